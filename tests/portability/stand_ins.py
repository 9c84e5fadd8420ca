"""Stand-ins for the AMD runtime libraries, so that JAX's ROCm compiler can be loaded on a machine without AMD's driver.

Compiling calls none of them; loading the plug-in needs every symbol that it imports, under its version. Each function
here says that there is no device. Needs gcc, ldd and readelf.
"""

import re
import subprocess
from pathlib import Path

_NO_DEVICE = 100  # hipErrorNoDevice
_SYSTEM_VERSION = re.compile(r"GLIBC|GCC|CXXABI")
_FOUND_ELSEWHERE = re.compile(r"_?Py|ZSTD_|__tsan|_ITM|__gmon|__cxa")


def build(site_packages: Path, folder: Path) -> None:
    """Writes the libraries into `folder`, for LD_LIBRARY_PATH. Raises FileNotFoundError without the plug-in."""
    plugins = sorted(site_packages.glob("jax_plugins/xla_rocm*/*.so")) + sorted(
        site_packages.glob("jax_rocm*_plugin/*.so")
    )
    if not plugins:
        raise FileNotFoundError(f"{site_packages}: no ROCm plug-in; pip install -e '.[gpu-check]'")
    libraries = {name for plugin in plugins for name in _absent_libraries(plugin)}
    symbols = sorted({symbol for plugin in plugins for symbol in _imported(plugin)})
    folder.mkdir(parents=True, exist_ok=True)
    source, versions = folder / "stand_ins.c", folder / "stand_ins.map"
    source.write_text("\n".join(_definition(number, *symbol) for number, symbol in enumerate(symbols)) + "\n")
    versions.write_text("".join(f"{version} {{ }};\n" for version in sorted({v for _, v in symbols if v})))
    for library in sorted(libraries):
        options = ("-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}")
        _output("gcc", *options, "-o", str(folder / library), str(source))


def _definition(number: int, name: str, version: str) -> str:
    function = f"int stand_in_{number}(void) {{ return {_NO_DEVICE}; }}\n"
    if version:
        return function + f'__asm__(".symver stand_in_{number},{name}@{version}");'
    return function + f'int {name}(void) __attribute__((alias("stand_in_{number}")));'


def _absent_libraries(plugin: Path) -> set[str]:
    lines = _output("ldd", str(plugin)).splitlines()
    return {line.split()[0] for line in lines if "not found" in line and "version" not in line}


def _imported(plugin: Path) -> set[tuple[str, str]]:
    """(name, version or "") of every symbol that some library has to define."""
    found = set()
    for line in _output("readelf", "--wide", "--dyn-syms", str(plugin)).splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] != "UND" or fields[4] == "WEAK":
            continue
        name, _, version = fields[7].partition("@")
        version = version.strip("@")
        if not _SYSTEM_VERSION.match(version) and not _FOUND_ELSEWHERE.match(name):
            found.add((name, version))
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
