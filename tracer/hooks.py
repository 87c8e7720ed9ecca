"""Hooks: the registry of everything these packages replace in TensorFlow, Keras and CPython.

Attributes belong to a `HookSet` (of modules, and classes known at import) or to `ClassHooks` (of the program's classes,
which must not be kept alive). Both restore exactly what they displaced; a foreign patch on top of a hook stays, since
it calls what it found. Anything else (profile functions, fork handlers, environment variables) is only declared.
`python -c "import coexec; from tracer import hooks; print(hooks.table())"` prints them all.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from operator import itemgetter
from types import ModuleType
from typing import Any

from tracer import versions

_MISSING: Any = object()  # marks an attribute that a class inherits

# How long a hook stays installed.
CALL = "a call is recorded or followed, or a lazy tensor lives"
PROCESS = "the process runs, or until `uninstall`"
LASTING = "the process runs: it cannot be taken back"

# Shared by all sets. Reentrant, since a finalizer may release a set at any point.
_lock = threading.RLock()
installing = _lock  # held while several hooks are added, once per process
registry: list[Hooks] = []


class Hooks:
    """One replacement or installation by a module, described in words; base class of the kinds below."""

    def __init__(self, owner: str, what: str, why: str, lifetime: str) -> None:
        self.owner, self.what, self.why, self.lifetime = owner, what, why, lifetime
        registry.append(self)

    def entries(self) -> list[tuple[Any, str]]:
        """Returns the currently replaced attributes as (module or class, name)."""
        return []

    def uninstall(self) -> None:
        """Removes the hooks, even if still in use."""


class _Hook:
    """One hooked attribute of a module or class."""

    __slots__ = ("above", "before", "hook", "name", "namespace", "target")

    def __init__(self, target: Any, name: str, hook: Any) -> None:
        self.target, self.name, self.hook = target, name, hook
        self.namespace = vars(target)
        self.before = self._now()  # what the hook displaces
        self.above: Any = _MISSING  # a foreign patch on top of the hook, seen on uninstall

    def _now(self) -> Any:
        now = self.namespace.get(self.name, _MISSING)
        # A module may define attributes lazily, through `__getattr__`.
        return getattr(self.target, self.name) if now is _MISSING and isinstance(self.target, ModuleType) else now

    def install(self, repairs: bool) -> None:
        """Installs the hook over the current value, unless that is a foreign patch on top of the hook.

        With `repairs` the hook was installed before: a current value that is neither the hook nor what it displaced is
        then such a patch.
        """
        now = self._now()
        if now is self.hook or (now is self.above and now is not _MISSING):
            return
        if repairs and now is not self.before:
            self.above = now
            return
        self.before, self.above = now, _MISSING
        setattr(self.target, self.name, self.hook)

    def uninstall(self, complete: bool) -> None:
        """Restores what the hook displaced if the hook is on top. `complete` says that the hook was installed."""
        now = self._now()
        if now is not self.hook:
            if complete and now is not self.before:
                self.above = now
        elif self.before is _MISSING:
            delattr(self.target, self.name)
        else:
            setattr(self.target, self.name, self.before)


class HookSet(Hooks):
    """Attributes that are replaced together while the set has users."""

    def __init__(self, owner: str, what: str, why: str, lifetime: str) -> None:
        super().__init__(owner, what, why, lifetime)
        self.users = 0
        self._complete = False  # whether all hooks are installed
        self._hooks: dict[tuple[int, str], _Hook] = {}  # by target's id and name
        self._modules: list[_Module] | None = None  # None: not computed
        self._others: list[_Hook] = []

    def add(self, target: Any, name: str, hook: Any) -> None:
        """Adds a hook, and installs it if the set is held; ValueError if the attribute is hooked already."""
        with _lock:
            place = id(target), name
            if place in self._hooks:
                raise ValueError(f"{name} of {target} is replaced already")
            one = self._hooks[place] = _Hook(target, name, hook)
            self._modules = None
            if self.users:
                one.install(False)

    def entries(self) -> list[tuple[Any, str]]:
        """Returns the currently replaced attributes as (target, name)."""
        return [(hook.target, hook.name) for hook in self._hooks.values()] if self.users else []

    def targets(self) -> list[Any]:
        """Returns the modules and classes whose attributes are replaced while there are users."""
        return [hook.target for hook in self._hooks.values()]

    def hold(self) -> None:
        """Adds a user; the first one installs the hooks, a later one repairs them if they have been removed."""
        with _lock:
            self.users += 1  # first, as a finalizer may release the set in between
            try:
                first = next(iter(self._hooks.values()))
                if self.users == 1 or first.namespace.get(first.name) is not first.hook:
                    self._install()
            except BaseException:
                self.release()
                raise

    def hold_for_good(self) -> None:
        """Adds a user that stays, unless nothing is to be followed with this version of TensorFlow."""
        if not versions.UNTESTED:
            self.hold()

    def release(self) -> None:
        """Removes a user; the last one restores the originals."""
        with _lock:
            if self.users == 1:  # before `users` changes: if this raises, the caller releases again
                self._uninstall()
            self.users -= 1

    def uninstall(self) -> None:
        """Restores the originals and drops all users."""
        with _lock:
            if self.users:
                self.users = 0
                self._uninstall()

    def clear(self) -> None:
        """Restores the originals and drops all hooks."""
        with _lock:
            self.uninstall()
            self._hooks, self._modules = {}, None

    def _install(self) -> None:
        modules = self._sorted() if self._modules is None else self._modules
        for module in modules:
            if module.get(module.names) == module.originals:
                module.names.update(module.after)
            else:
                for hook in module.hooks:
                    hook.install(self._complete)
                module.note()
        for hook in self._others:
            hook.install(self._complete)
        self._complete = True

    def _uninstall(self) -> None:
        modules = self._sorted() if self._modules is None else self._modules
        for module in modules:
            if module.get(module.names) == module.replaced:
                module.names.update(module.before)
            else:
                for hook in module.hooks:
                    hook.uninstall(self._complete)
        for hook in self._others:
            hook.uninstall(self._complete)
        self._complete = False

    def _sorted(self) -> list[_Module]:
        modules: dict[int, list[_Hook]] = {}
        self._others = []
        for hook in self._hooks.values():
            if isinstance(hook.target, ModuleType) and hook.name in hook.namespace:
                modules.setdefault(id(hook.target), []).append(hook)
            else:
                self._others.append(hook)
        self._modules = [_Module(hooks) for hooks in modules.values()]
        return self._modules


class _Module:
    """The hooks of one module, swapped in one dict update unless other code has changed them: 1 us for 20."""

    def __init__(self, hooks: list[_Hook]) -> None:
        self.hooks = hooks
        self.names: dict[str, Any] = hooks[0].namespace
        self.after = {hook.name: hook.hook for hook in hooks}
        names = [*self.after]
        self.get = itemgetter(*names, names[0])  # two names at least, for a tuple, which compares by identity first
        self.replaced = (*self.after.values(), self.after[names[0]])
        self.note()

    def note(self) -> None:
        """Updates what the hooks displace."""
        self.before = {hook.name: hook.before for hook in self.hooks}
        self.originals = (*self.before.values(), self.before[self.hooks[0].name])


class ClassHooks(Hooks):
    """One attribute on many classes, keeping neither the classes nor their hooks alive."""

    def __init__(self, owner: str, what: str, why: str, lifetime: str, name: str) -> None:
        super().__init__(owner, what, why, lifetime)
        self._name = name
        # The hook is reachable from its class, and may reach the class through what it displaced: so both references
        # are weak.
        self._hooks: weakref.WeakKeyDictionary[type, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def __contains__(self, kind: type) -> bool:
        return kind in self._hooks

    def add(self, kind: type, hook: Callable[..., Any]) -> None:
        """Replaces the attribute on `kind`; the hook keeps the class's own original, if any, as `__wrapped__`."""
        if self._name in vars(kind):
            hook.__wrapped__ = vars(kind)[self._name]  # type: ignore[attr-defined]
        setattr(kind, self._name, hook)
        self._hooks[kind] = weakref.ref(hook)

    def entries(self) -> list[tuple[Any, str]]:
        """Returns the currently replaced attributes as (class, name)."""
        return [(kind, self._name) for kind in list(self._hooks)]

    def uninstall(self) -> None:
        """Restores each class's own or inherited attribute if the hook is still on top."""
        for kind, reference in list(self._hooks.items()):
            hook = reference()
            if hook is None or vars(kind).get(self._name) is not hook:
                continue
            before = getattr(hook, "__wrapped__", _MISSING)
            if before is _MISSING:
                delattr(kind, self._name)
            else:
                setattr(kind, self._name, before)
        self._hooks.clear()


class AtExit(Hooks):
    """A function registered to run at process exit."""

    def __init__(self, owner: str, why: str, function: Callable[[], object]) -> None:
        super().__init__(owner, "`atexit.register`", why, PROCESS)
        self._function = atexit.register(function)

    def uninstall(self) -> None:
        """Unregisters the function."""
        atexit.unregister(self._function)


def at_fork(
    owner: str,
    why: str,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Registers functions that run around `os.fork`; CPython cannot remove them."""
    handlers = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
    os.register_at_fork(**{name: function for name, function in handlers.items() if function is not None})
    Hooks(owner, "`os.register_at_fork`", why, LASTING)


def held_by_fork(owner: str, lock: Any) -> None:
    """Makes forks acquire `lock` first, so that it is free in the child, where no other thread could release it."""
    at_fork(owner, "a lock is free in the child", lock.acquire, lock.release, lock.release)


def uninstall() -> None:
    """Removes every removable hook; no call may be running, and later ones do without the hooks.

    Lazy tensors that are still alive can no longer be passed to TensorFlow.
    """
    for hooks in reversed(registry):
        hooks.uninstall()


def table() -> str:
    """Returns all hooks as a Markdown table."""
    rows = sorted({(hooks.owner, hooks.what, hooks.why, hooks.lifetime) for hooks in registry})
    lines = [f"| `{owner}` | {what} | {why} | {lifetime} |" for owner, what, why, lifetime in rows]
    return "\n".join(["| owner | hooks | why | while |", "|---|---|---|---|", *lines])


held_by_fork(__name__, _lock)
