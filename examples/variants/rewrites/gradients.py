"""How gradients are asked for, paired with variables and applied."""

import ast
import copy

from examples.variants.rewrites import rewrite
from examples.variants.source import NotApplicable, Source, attribute, filled, is_tape, parsed, substitute


def _each(source: Source, text: str) -> None:
    """Writes each update anew, from its `OPTIMIZER`, `GRADIENTS` and `VARIABLES`."""
    for statements, place, call in source.updates():
        gradients, variables = call.args[0].args
        parts = {"OPTIMIZER": call.func.value, "GRADIENTS": gradients, "VARIABLES": variables}
        statements[place : place + 1] = filled(text, **parts)


@rewrite("gradients in a variable")
def variable(source: Source) -> None:
    _each(source, "gradients = GRADIENTS\nOPTIMIZER.apply_gradients(zip(gradients, VARIABLES))")


@rewrite("a list of pairs")
def list_(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients(list(zip(GRADIENTS, VARIABLES)))")


@rewrite("a comprehension of pairs")
def comprehension(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients([(g, v) for g, v in zip(GRADIENTS, VARIABLES)])")


@rewrite("a comprehension that drops what has no gradient")
def filtered(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients([(g, v) for g, v in zip(GRADIENTS, VARIABLES) if g is not None])")


@rewrite("a generator of pairs")
def generator(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients((g, v) for g, v in zip(GRADIENTS, VARIABLES))")


@rewrite("a loop over pairs")
def loop(source: Source) -> None:
    _each(
        source,
        "pairs = []\nfor g, v in zip(GRADIENTS, VARIABLES):\n    pairs.append((g, v))\n"
        "OPTIMIZER.apply_gradients(pairs)",
    )


@rewrite("a loop over numbers")
def numbers(source: Source) -> None:
    _each(
        source,
        "gradients = GRADIENTS\npairs = []\nfor n in range(len(gradients)):\n"
        "    pairs.append((gradients[n], VARIABLES[n]))\nOPTIMIZER.apply_gradients(pairs)",
    )


@rewrite("strict pairs")
def strict(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients(zip(GRADIENTS, VARIABLES, strict=True))")


@rewrite("apply in place of apply_gradients")
def apply(source: Source) -> None:
    _each(source, "OPTIMIZER.apply(GRADIENTS, VARIABLES)")


@rewrite("pairs by name")
def by_name(source: Source) -> None:
    _each(
        source,
        "by_name = dict(enumerate(zip(GRADIENTS, VARIABLES)))\nOPTIMIZER.apply_gradients(list(by_name.values()))",
    )


@rewrite("an argument by name")
def by_keyword(source: Source) -> None:
    _each(source, "OPTIMIZER.apply_gradients(grads_and_vars=zip(GRADIENTS, VARIABLES))")


@rewrite("variables listed before")
def listed(source: Source) -> None:
    found = False
    for place, node in reversed([*enumerate(source.step.body)]):
        if isinstance(node, ast.Assign) and attribute(node.value) == "trainable_variables":
            name = f"listed{place}"
            source.before_step(filled(f"{name} = list(VALUE)", VALUE=node.value))
            node.value, found = ast.Name(name, ast.Load()), True
    if not found:
        raise NotApplicable("listed already")


@rewrite("variables asked for twice")
def twice(source: Source) -> None:
    found = {}
    for node in [*source.step.body]:
        if isinstance(node, ast.Assign) and attribute(node.value) == "trainable_variables":
            found[node.targets[0].id] = ast.unparse(node.value)
            source.step.body.remove(node)
    if len(found) != 1 or "variables" in source.parameters():
        raise NotApplicable("listed already")
    substitute(source.step.body, found)


@rewrite("a persistent tape")
def persistent(source: Source) -> None:
    _, _, tape = source.tape()
    for item in tape.items:
        if is_tape(item.context_expr):
            item.context_expr.keywords.append(ast.keyword("persistent", ast.Constant(True)))


@rewrite("a persistent tape that is deleted")
def deleted(source: Source) -> None:
    persistent(source)
    _, _, tape = source.tape()
    source.end_step("\n".join(f"del {ast.unparse(item.optional_vars)}" for item in tape.items))


@rewrite("the gradient inside of the tape")
def inside(source: Source) -> None:
    statements, place, tape = source.tape()
    behind = statements[place + 1 :]
    end = next((n for n, s in enumerate(behind) if ".gradient(" in ast.unparse(s)), None)
    if end is None or len(tape.items) > 1:
        raise NotApplicable("several tapes")
    new = []
    for statement in behind[: end + 1]:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and attribute(node.func) == "gradient":
                new.append(filled("gradients = VALUE", VALUE=_copied(node))[0])
                node.func, node.args = ast.Name("list", ast.Load()), [ast.Name("gradients", ast.Load())]
                node.keywords = []
                break
    assigned = behind[:end]
    tape.body += [*assigned, *new]
    statements[place + 1 : place + 1 + end] = []


@rewrite("the tape made before it is entered")
def made_before(source: Source) -> None:
    statements, place, tape = source.tape()
    if len(tape.items) > 1 or not isinstance(tape.items[0].optional_vars, ast.Name):
        raise NotApplicable("several tapes")
    name = tape.items[0].optional_vars
    made = filled(f"{name.id} = TAPE", TAPE=tape.items[0].context_expr)
    tape.items[0].context_expr, tape.items[0].optional_vars = ast.Name(name.id, ast.Load()), None
    statements[place:place] = made


@rewrite("variables watched by name")
def watched(source: Source) -> None:
    """Variables are watched by name, and nothing else."""
    _, _, tape = source.tape()
    variables = next((ast.unparse(c.args[0].args[1]) for _, _, c in source.updates()), None)
    known = {s.targets[0].id: ast.unparse(s.value) for s in source.step.body
             if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)}  # fmt: skip
    if len(tape.items) > 1:
        raise NotApplicable("several tapes")
    item = tape.items[0]
    item.context_expr.keywords.append(ast.keyword("watch_accessed_variables", ast.Constant(False)))
    tape.body[0:0] = parsed(f"{item.optional_vars.id}.watch({known.get(variables, variables)})")


def _copied(node: ast.AST) -> ast.AST:
    return copy.deepcopy(node)
