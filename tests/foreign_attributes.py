"""Finds what a module reaches for in objects of an untyped library.

Such objects come from `import_module` of that library, and are annotated `Any` in our code; what
is taken out of one is one. Flow is ignored: a name is foreign in the whole of its function.
"""

import ast
from collections.abc import Iterator

PASSING_ON = {"list", "tuple", "set", "zip", "iter", "next", "enumerate", "sorted", "reversed"}

Use = tuple[str, tuple[int, frozenset[str]] | None]
"""An attribute; if it is called, with how many positional arguments, and which keywords."""


def foreign_uses(source: str, library: str) -> set[Use]:
    """What a module's code reaches for in objects of a library."""
    tree = ast.parse(source)
    members = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and is_any(node.returns) and node.decorator_list
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    readers = [_Reader(function, library, members) for function in functions]
    before = -1
    while before != (before := len(members) + sum(len(r.names) for r in readers)):
        for reader in readers:
            reader.spread()
    return {use for reader in readers for use in reader.uses()}


class _Reader:
    """One function.

    Args:
        function: Its code.
        library: Whose objects are foreign.
        members: Attributes of `self` that hold foreign objects; grows.
    """

    def __init__(self, function: ast.FunctionDef, library: str, members: set[str]) -> None:
        self.body, self.library, self.members = function, library, members
        self.names = {a.arg for a in function.args.args if is_any(a.annotation)}

    def spread(self) -> None:
        for target, value in assignments(self.body):
            if self.is_foreign(value):
                for each in ast.walk(target):
                    if isinstance(each, ast.Name) and each.id != "self":
                        self.names.add(each.id)
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    self.members.add(target.attr)

    def is_foreign(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return name in self.members
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
                return self.is_foreign(value)
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=module)]):
                return str(module).split(".")[0] == self.library
            case ast.Call(func=ast.Attribute(attr=name)) if name == f"import_{self.library}":
                return True
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                return self.is_foreign(value)
            case ast.Call(func=ast.Name(id=name), args=args) if name in PASSING_ON:
                return any(map(self.is_foreign, args))
            case ast.Call(func=function):
                return self.is_foreign(function)
            case ast.IfExp(body=one, orelse=other):
                return self.is_foreign(one) or self.is_foreign(other)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values):
                return any(map(self.is_foreign, values))
        return False

    def uses(self) -> Iterator[Use]:
        called = set()
        for node in ast.walk(self.body):
            match node:
                case ast.Call(func=ast.Attribute(value=value, attr=name)) if self.is_foreign(value):
                    called.add(node.func)
                    keywords = frozenset(k.arg for k in node.keywords if k.arg)
                    yield name, (len(node.args), keywords)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[value, ast.Constant(value=name), *_],
                ) if self.is_foreign(value):
                    yield str(name), None
                case ast.Attribute(value=value, attr=name) if self.is_foreign(value):
                    if node not in called:
                        yield name, None


def is_any(annotation: ast.AST | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def assignments(body: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Targets, and what goes into them."""
    for node in ast.walk(body):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case (
                ast.AnnAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
            ):
                yield target, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield target, value
            case ast.withitem(context_expr=value, optional_vars=ast.AST() as target):
                yield target, value
