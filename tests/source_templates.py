"""Every text that the source of a package can show, as templates: `{}` stands for what is filled in.

Read with `ast`, so that nothing has to run. A text gives one template for each combination of the words that its expressions
choose between: `{'s' * (n != 1)}`, `a if b else c`, `{count or 'no'}`, a name that the same function has set to a text, a
function that returns one.
"""

import ast
import itertools
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_MOST = 100
"""Combinations of one text; more are left out."""
_FIGURES = {"show_bytes", "show_rate", "show_seconds", "flag_bytes", "show_metric", "in_one_line", "kind_of"}
"""Functions whose text is one of many: only `{}` stands for it."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def templates_in(*paths: Path) -> frozenset[str]:
    """Of these files and of those below these folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    trees = [_tree(file) for file in files]
    functions = _Functions(trees)
    found = {text for scope in (*trees, *functions.nodes) for text in _Scope(scope, functions).texts()}
    return frozenset(found | {text.replace("_", " ") for text in found if text.isidentifier()})


def raised_in(root: Path, base: str) -> list[tuple[str, list[str]]]:
    """The messages with which this error and those derived from it are raised, by place: every form that one may have."""
    trees = {file: _tree(file) for file in sorted(root.rglob("*.py"))}
    classes = [node for tree in trees.values() for node in _nodes(tree) if isinstance(node, ast.ClassDef)]
    names = {base}
    while more := {one.name for one in classes if {getattr(base, "id", "") for base in one.bases} & names} - names:
        names |= more
    functions = _Functions(trees.values())
    found = []
    for file, tree in trees.items():
        for function in (node for node in _nodes(tree) if isinstance(node, _FUNCTIONS)):
            scope = _Scope(function, functions)
            for node in _nodes(function):
                match node:
                    case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])) if name in names:
                        texts = [text for text in scope._texts(message, 2) if re.search("[a-z]{3}", text)]
                        found += [(f"{file.relative_to(root)}:{node.lineno}", texts)] if texts else []
    return found


def normalized(template: str) -> str:
    """A template of the catalogue or of `tr` in the same form: `{rows:,} rows` as `{} rows`."""
    return _joined(re.sub(r"\{\w+(?:[:!][^}]*)?\}", "{}", template))


def _joined(template: str) -> str:
    """Two placeholders side by side look like one, and `%s` of a log message is one."""
    return re.sub(r"(?:\{\})+", "{}", re.sub(r"%[sdr]", "{}", template))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(scope))


class _Functions:
    """The functions of a package, by name, and the texts that each returns. Some are called in hundreds of places."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.nodes = [node for tree in trees for node in _nodes(tree) if isinstance(node, _FUNCTIONS)]
        self._returned: dict[tuple[ast.AST, int], list[str]] = {}
        self._by_name: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            if node.name not in _FIGURES:
                self._by_name.setdefault(node.name, []).append(node)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def returned(self, name: str, depth: int) -> list[str]:
        """The texts that functions of this name return."""
        return [text for function in self._by_name[name] for text in self._texts(function, depth)]

    def _texts(self, function: ast.AST, depth: int) -> list[str]:
        if (function, depth) not in self._returned:
            scope = _Scope(function, self)
            values = [node.value for node in _nodes(function) if isinstance(node, ast.Return) and node.value]
            self._returned[function, depth] = [text for value in values for text in scope._texts(value, depth)]
        return self._returned[function, depth]


class _Scope:
    """A module or a function, and what its names are set to."""

    def __init__(self, scope: ast.AST, functions: _Functions) -> None:
        self._scope, self._functions = scope, functions
        self._names: dict[str, list[ast.expr]] = {}
        self._added: dict[str, list[ast.expr]] = {}
        for node in _nodes(scope):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._names.setdefault(name, []).append(value)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    for target, value in zip(targets, values, strict=False):
                        if isinstance(target, ast.Name):
                            self._names.setdefault(target.id, []).append(value)
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    self._added.setdefault(name, []).append(value)

    def texts(self) -> list[str]:
        docstrings = {id(node.value) for node in _nodes(self._scope) if isinstance(node, ast.Expr)}
        kinds = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call)
        nodes = [node for node in _nodes(self._scope) if isinstance(node, kinds) and id(node) not in docstrings]
        return [normalized(text) for node in nodes for text in self._texts(node, 2)]

    def _texts(self, node: ast.AST, depth: int) -> list[str]:
        """The texts that an expression may give; `{}` for what is not known."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return _combined(*(self._texts(value, depth) for value in values))
            case ast.FormattedValue(value=value):
                return self._texts(value, depth)
            case ast.IfExp(body=body, orelse=other):
                return [*self._texts(body, depth), *self._texts(other, depth)]
            case ast.BoolOp(op=ast.Or(), values=values):
                return [text for value in values for text in self._texts(value, depth)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _combined(self._texts(left, depth), self._texts(right, depth))
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mult()):
                return ["", text]
            case ast.Call(func=ast.Name(id="show_rows")):
                return ["{}", "{} row", "{} rows"]
            case ast.Call(func=ast.Name(id="show_count"), args=[_, ast.Constant(value=str(word))]):
                return ["{}", f"{{}} {word}", f"{{}} {word}s"]
            case ast.Call(func=ast.Name(id=name)) if depth and name in self._functions:
                return list(dict.fromkeys(["{}", *self._functions.returned(name, depth - 1)]))[:_MOST]
            case ast.Name(id=name) if depth:
                known = [text for value in self._names.get(name, ()) for text in self._texts(value, depth - 1)]
                for value in self._added.get(name, ()):
                    known += _combined(known, self._texts(value, depth - 1))
                return list(dict.fromkeys(["{}", *known]))[:_MOST]
        return ["{}"]


def _combined(*parts: list[str]) -> list[str]:
    return ["".join(texts) for texts in itertools.islice(itertools.product(*parts), _MOST)]
