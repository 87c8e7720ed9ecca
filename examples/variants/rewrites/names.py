"""By which names the step reaches TensorFlow, Keras and what is its own."""

import ast

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, rename, substitute


@rewrite("import inside")
def import_inside(source: Source) -> None:
    source.begin_step("import tensorflow as tf")


@rewrite("import in the function around")
def import_around(source: Source) -> None:
    source.before_step("import tensorflow as tf")


@rewrite("import under another name")
def import_renamed(source: Source) -> None:
    source.import_("tensorflow as T")
    rename(source.step.body, "tf", "T")


@rewrite("import of one class")
def import_from(source: Source) -> None:
    _, _, tape = source.tape()
    source.define("from tensorflow import GradientTape")
    for item in tape.items:
        if getattr(getattr(item.context_expr, "func", None), "attr", None) == "GradientTape":
            item.context_expr.func = _name("GradientTape")


@rewrite("TensorFlow as an attribute")
def attribute(source: Source) -> None:
    source.import_("types")
    source.before_step("libraries = types.SimpleNamespace(tf=tf)")
    rename(source.step.body, "tf", "libraries.tf")


@rewrite("TensorFlow as a class attribute")
def class_attribute(source: Source) -> None:
    source.define("class Libraries:\n    tf = tf")
    rename(source.step.body, "tf", "Libraries.tf")


@rewrite("TensorFlow in a dict")
def item(source: Source) -> None:
    source.before_step("libraries = {'tf': tf}")
    rename(source.step.body, "tf", "libraries['tf']")


@rewrite("TensorFlow as an argument's default")
def default(source: Source) -> None:
    _with_defaults(source, {"tf": "tf"})


@rewrite("TensorFlow's Keras")
def through_keras(source: Source) -> None:
    rename(source.factory.body, "keras", "tf.keras")


@rewrite("functions under names of one's own")
def aliases(source: Source) -> None:
    source.before_step("Tape = tf.GradientTape\nmean, square = tf.reduce_mean, tf.square")
    class Alias(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            new = {"tf.GradientTape": "Tape", "tf.reduce_mean": "mean", "tf.square": "square"}.get(ast.unparse(node))
            self.generic_visit(node)
            return _name(new) if new else node

    source.step = Alias().visit(source.step)


@rewrite("variables of the function around as globals")
def globals_(source: Source) -> None:
    if not source.shared():
        raise NotApplicable("nothing is shared")
    source.factory.body.insert(0, _parse(f"global {', '.join(source.shared())}"))


@rewrite("variables of the function around in a namespace")
def namespace(source: Source) -> None:
    names = _some(source)
    source.import_("types")
    source.before_step(f"parts = types.SimpleNamespace({', '.join(f'{n}={n}' for n in names)})")
    substitute(source.step.body, {n: f"parts.{n}" for n in names})


@rewrite("variables of the function around in a dict")
def in_a_dict(source: Source) -> None:
    names = _some(source)
    source.before_step(f"parts = dict({', '.join(f'{n}={n}' for n in names)})")
    substitute(source.step.body, {n: f"parts[{n!r}]" for n in names})


@rewrite("variables of the function around as defaults")
def defaults(source: Source) -> None:
    _with_defaults(source, {n: n for n in _some(source)})


@rewrite("variables of the function around in nested objects")
def nested(source: Source) -> None:
    names = _some(source)
    source.import_("types")
    source.before_step(
        f"inner = types.SimpleNamespace({', '.join(f'{n}={n}' for n in names)})\n"
        "outer = types.SimpleNamespace(parts=inner)"
    )
    substitute(source.step.body, {n: f"outer.parts.{n}" for n in names})


@rewrite("local names for what is used")
def locals_(source: Source) -> None:
    names = _some(source)
    source.before_step(f"everything = ({', '.join(names)},)")
    substitute(source.step.body, {n: f"{n}_" for n in names})
    source.begin_step(f"{', '.join(f'{n}_' for n in names)}, = everything")


def _some(source: Source) -> list[str]:
    names = source.shared()
    if not names:
        raise NotApplicable("nothing is shared")
    return names


def _with_defaults(source: Source, new: dict[str, str]) -> None:
    arguments = source.step.args
    if arguments.kwarg or arguments.vararg:
        raise NotApplicable("arguments of any number")
    for name, value in new.items():
        arguments.kwonlyargs.append(ast.arg(name))
        arguments.kw_defaults.append(ast.parse(value, mode="eval").body)


def _name(text: str) -> ast.expr:
    return ast.Name(text, ast.Load())


def _parse(text: str) -> ast.stmt:
    return ast.parse(text).body[0]
