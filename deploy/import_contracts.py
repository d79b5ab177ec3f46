"""Import contract against circles of files, which contracts between folders do not see."""

import networkx
from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class NoCircles(Contract):
    """No file of a package imports itself through other files, also not inside functions or for types."""

    type_name = "no_circles"
    package = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Finds the sets of files that import each other."""
        package = str(self.package)
        files = {name for name in graph.modules if f"{name}.".startswith(f"{package}.")}
        imports = {name: graph.find_modules_directly_imported_by(name) & files for name in files}
        components = networkx.strongly_connected_components(networkx.DiGraph(imports))
        circles = sorted(sorted(component) for component in components if len(component) > 1)
        return ContractCheck(kept=not circles, metadata={"circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the files of each circle."""
        for circle in check.metadata["circles"]:
            output.print_error(f"files that import each other: {', '.join(circle)}")
