"""All modules of the repository, and the definition behind each name in them."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.codemod.scopes import LOCAL, Binding, FileScopes, Scope


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Symbols:
    """The modules of a tree and what they bind at their top level.

    Args:
        sources: text of each Python file by its path below the root.
        known: definitions that count even if their module does not have them (any more).
    """

    def __init__(self, sources: Mapping[str, str], known: Iterable[Binding] = ()) -> None:
        self._known = frozenset(known)
        self.syntax = {path: ast.parse(source) for path, source in sources.items()}
        self.files = {
            path: FileScopes(syntax, module_name(path), is_package=path.endswith("/__init__.py"))
            for path, syntax in self.syntax.items()
        }
        self._tops = {module_name(path): file.module_scope for path, file in self.files.items()}
        self._packages = {
            str(folder).replace("/", ".") for path in sources for folder in Path(path).parents
        } - {"."}

    def is_module(self, dotted: str) -> bool:
        return dotted in self._tops or dotted in self._packages

    def defines(self, module: str, name: str) -> bool:
        return Binding(module, name) in self._bindings(module, name)

    def resolve(self, binding: Binding) -> Binding:
        """Follow imports to the definition or module. LOCAL if it is of no module here."""
        for _ in range(10):
            module, name = binding
            if not name:
                return binding if self.is_module(module) else LOCAL
            found = self._bindings(module, name)
            if binding in found or (not found and binding in self._known):
                return binding
            if not found and self.is_module(f"{module}.{name}"):
                return Binding(f"{module}.{name}")
            if len(found) != 1:
                return LOCAL
            (binding,) = found
        return LOCAL

    def _bindings(self, module: str, name: str) -> set[Binding]:
        top = self._tops.get(module)
        return top.bindings.get(name, set()) if top else set()

    def of_name(self, name: str, scope: Scope) -> Binding:
        """Return the definition that a name refers to where it is used."""
        binder = scope.binder(name)
        if binder is None:
            return LOCAL
        found = {self.resolve(binding) for binding in binder.bindings[name]}
        return found.pop() if len(found) == 1 else LOCAL

    def of_expression(self, node: ast.expr, scope: Scope) -> Binding:
        """Return the definition or module that a name or chain of attributes refers to."""
        if isinstance(node, ast.Name):
            return self.of_name(node.id, scope)
        if isinstance(node, ast.Attribute):
            base = self.of_expression(node.value, scope)
            if base.module and not base.name:
                return self.resolve(Binding(base.module, node.attr))
        return LOCAL

    def of_dotted(self, parts: list[str], top: Binding = LOCAL) -> tuple[int, Binding]:
        """Return which of the parts of a dotted name is a definition in a module, and it.

        Args:
            top: the module that the first part stands for, if it is not its own name.
        """
        base = top if top.module and not top.name else Binding(parts[0])
        for index, part in enumerate(parts[1:], 1):
            if not self.is_module(base.module):
                break
            base = self.resolve(Binding(base.module, part))
            if base.name:
                return index, base
            if not base.module:
                break
        return 0, LOCAL
