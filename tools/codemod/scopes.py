"""The names of one Python file: where each is bound, and which binding each use refers to."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Binding(NamedTuple):
    """What a name stands for: the name of a module's top level, a module, or something local."""

    module: str = ""
    name: str = ""  # of the module; empty: the module itself


LOCAL = Binding()


class Scope:
    """A module, class, function or comprehension, with the names that it binds."""

    def __init__(self, parent: "Scope | None", *, is_class: bool = False) -> None:
        self.parent = parent
        self.is_class = is_class
        self.bindings: dict[str, set[Binding]] = defaultdict(set)
        self.globals: set[str] = set()

    @property
    def top(self) -> "Scope":
        return self if self.parent is None else self.parent.top

    def binder(self, name: str) -> "Scope | None":
        """Return the scope that binds a name that is used in this one."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.globals:
                return self.top if name in self.top.bindings else None
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


class FileScopes(ast.NodeVisitor):
    """The scopes of a file, and the scope of each expression, import and string in it.

    Args:
        module: dotted name of the file's module.
    """

    def __init__(self, syntax: ast.Module, module: str, *, is_package: bool) -> None:
        self._module = module
        self._package = module if is_package else module.rpartition(".")[0]
        self.module_scope = self._scope = Scope(None)
        self.scopes: dict[ast.AST, Scope] = {}
        self.visit(syntax)

    def visit(self, node: ast.AST) -> None:
        self.scopes[node] = self._scope
        super().visit(node)

    def _bind(self, name: str, binding: Binding = LOCAL) -> None:
        if binding is LOCAL and self._scope.parent is None:
            binding = Binding(self._module, name)
        self._scope.bindings[name].add(binding)

    def _within(self, scope: Scope, nodes: Iterator[ast.AST] | list[ast.AST]) -> None:
        outer, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self._bind(alias.asname, Binding(alias.name))
            else:
                top = alias.name.split(".")[0]
                self._bind(top, Binding(top))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name, Binding(self.imported_from(node), alias.name))
        self.generic_visit(node)

    def imported_from(self, node: ast.ImportFrom) -> str:
        """Return the module's dotted name."""
        if not node.level:
            return node.module or ""
        base = self._package.split(".")
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._bind(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target.id)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._bind_and_visit(node, node.name)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._bind_and_visit(node, node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._bind_and_visit(node, node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._bind_and_visit(node, node.rest)

    def _bind_and_visit(self, node: ast.AST, name: str | None) -> None:
        if name:
            self._bind(name)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.globals.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        pass  # the enclosing function binds the names

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._within(Scope(self._scope, is_class=True), list(node.body))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        for part in (*node.decorator_list, *([node.returns] if node.returns else [])):
            self.visit(part)
        self._within(self._parameters(node.args), list(node.body))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._within(self._parameters(node.args), [node.body])

    def _parameters(self, arguments: ast.arguments) -> Scope:
        """Visit defaults and annotations outside, and return a scope with the parameters."""
        self.visit(arguments)
        scope = Scope(self._scope)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                scope.bindings[argument.arg].add(LOCAL)
        return scope

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, [node.elt])

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, [node.key, node.value])

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        elements: list[ast.expr],
    ) -> None:
        self.visit(node.generators[0].iter)
        inner: list[ast.AST] = []
        for generator in node.generators:
            parts = (generator.target, generator.iter, *generator.ifs)
            inner.extend(part for part in parts if part is not node.generators[0].iter)
        self._within(Scope(self._scope), [*inner, *elements])
