#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that _core.pyi says what the compiled module has: names, parameters and their defaults.

nanobind writes a stub of the module; both are parsed and compared. A name that the module has and the stub leaves out
is an error too, except behind a __getattr__ (slimrt._core.ops). What nanobind knows as keyword arguments in general
(**options: plan, resolve_layers; Engine takes plan's) is tried instead, each with the default of the stub.

usage: check_stub.py MODEL.gguf (any model)
"""

import ast
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

from slimrt import _core
from slimrt.errors import SlimrtError

Scope = dict[str, "str | Scope"]


def scope_of(body: list[ast.stmt]) -> Scope:
    """Names with their parameters, classes with theirs."""
    found: Scope = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = scope_of(node.body)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node.args)
    return found


def parameters(args: ast.arguments) -> str:
    """Without annotations (nanobind knows a NumPy array only as that), names that no caller can use, and the digits
    that a float32 has too many."""
    for one in args.posonlyargs:
        one.arg = "self" if one.arg == "self" else "_"
    for default in [*args.defaults, *args.kw_defaults]:
        if isinstance(default, ast.Constant) and isinstance(default.value, float):
            default.value = float(f"{default.value:.6g}")
    for one in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if one:
            one.annotation = None
    return ast.unparse(args)


def differences(stub: Scope, module: Scope, where: str = "") -> list[str]:
    unsaid = [] if "__getattr__" in stub else sorted(name for name in module.keys() - stub.keys() if name[0] != "_")
    said = [f"{where}{name}: the module has it, the stub does not" for name in unsaid]
    for name, wanted in stub.items():
        got = module.get(name)
        if isinstance(wanted, dict):
            said += differences(wanted, got, f"{name}.") if isinstance(got, dict) else [f"{where}{name}: no such class"]
        elif got is None:
            said += [f"{where}{name}: the stub has it, the module does not"] if name != "__getattr__" else []
        elif "**" not in got and got != wanted:
            said.append(f"{where}{name}: ({got}) in the module, ({wanted}) in the stub")
    return said


def options(stub: ast.Module, name: str) -> dict[str, object]:
    """What a function of the stub takes by name, with its defaults."""
    function = next(node for node in stub.body if isinstance(node, ast.FunctionDef) and node.name == name)
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {arg.arg: ast.literal_eval(default) for arg, default in pairs if default}


def tried(stub: ast.Module, model: str) -> list[str]:
    """Defaults that the module refuses, or that change what it says."""
    said = []
    for function in ("plan", "resolve_layers"):
        call = getattr(_core, function)
        usual = call(model)
        for name, value in options(stub, function).items():
            try:
                if call(model, **{name: value}) != usual:
                    said.append(f"{function}: {name}={value!r} is not the module's default")
            except (TypeError, ValueError, SlimrtError) as error:
                said.append(f"{function}: {name}={value!r}: {error}")
    return said


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    generated = StubGen(_core)
    generated.put(_core)
    ops = StubGen(_core.ops)
    ops.put(_core.ops)
    stub = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())
    module = scope_of(ast.parse(generated.get()).body)
    module["_Ops"] = scope_of(ast.parse(ops.get()).body)
    wanted = scope_of(stub.body)
    for name, value in wanted["_Ops"].items():
        wanted["_Ops"][name] = value.removeprefix("self, ")
    said = differences(wanted, module) + tried(stub, sys.argv[1])
    print("\n".join(said) or f"_core.pyi: {len(wanted)} names as in the module")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
