"""Draw functions of the package at random, to review their names.

    python tests/project/draw_functions.py --seed 1 --count 100

Each line is a module with the function's class, name and arguments, and the type that it returns. Properties have no
parentheses. Cover the docstring: what does the function do?
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def list_functions(node: ast.AST, prefix: str) -> Iterator[str]:
    """Yield the functions, methods and nested functions below a node, without dunder methods."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("__"):
            is_property = any("property" in ast.unparse(decorator) for decorator in child.decorator_list)
            arguments = "" if is_property else f"({', '.join(list_arguments(child.args))})"
            returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            yield f"{prefix}{child.name}{arguments}{returns}"
        is_scope = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        yield from list_functions(child, f"{prefix}{child.name}." if is_scope else prefix)  # type: ignore[attr-defined]


def list_arguments(arguments: ast.arguments) -> list[str]:
    """Return the names of a function's arguments, without ``self`` and ``cls``."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in names if name not in {"self", "cls"}]


def draw_functions(folder: Path, seed: int, count: int) -> list[str]:
    """Draw different functions of the modules in a folder. The same seed and code give the same functions."""
    functions = [
        f"{'.'.join(path.relative_to(folder.parent).with_suffix('').parts)}  {function}"
        for path in sorted(folder.rglob("*.py"))
        for function in list_functions(ast.parse(path.read_text("utf-8")), "")
    ]
    return random.Random(seed).sample(functions, min(count, len(functions)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument("--count", type=int, default=100, help="number of functions (default 100)")
    options = parser.parse_args()
    print("\n".join(draw_functions(ROOT / "fedpipe", options.seed, options.count)))
