"""What the inner loop of a CUDA kernel issues, as compiled: instructions of each kind beside those of the products. No GPU.

    python bench/sass.py                                        bfloat16, head_dim 64 and 128, sm_90
    python bench/sass.py --dtypes float64 --dims 64 128 --arch 80 --json

The loop is that of a tile which all rows see in full, of aligned rows, without softcap or ALiBi, whose maxima have not moved: branches
for the rest are taken out of a copy of the sources before they are compiled. Needs nvcc and nvdisasm (the extra `test`).
"""
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from driver import Table, arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from test_cuda_compile import LARGE, NVCC, instantiation, nvdisasm

from ringmpi.tiles import registry

KINDS = ("forward", "backward_dq", "backward_dkdv")
# What is not so in the loop that counts, by file: each must be found.
STRAIGHT = {
    "forward.cu": [(r"const bool gaps = .*?;", "const bool gaps = false;"), (r"!score\.plain", "false"),
                   (r"!rows\.full\(key, BN\)", "false"), (r"rows\.meets\(key, BN\)", "true"),
                   (r"PLANTED\(9\) \? .*?: __any_sync\(ALL_LANES, moved\)", "false")],
    "backward.cu": [(r"const bool gaps = .*?;", "const bool gaps = false;"), (r"!score\.plain", "false"),
                    (r"const bool full = .*?;", "const bool full = true;"), (r"rows\.meets\(key, BN\)", "true"),
                    (r"rows\.meets\(first \+ mine, 16 \* M\)", "true"), (r"const bool picky = .*?;", "const bool picky = false;"),
                    (r"if \(!spans\) return", "return"), (r"bounds \? bounds\[row \+ i\] :", "")],
    "tile.cuh": [(r"aligned \|\| PLANTED\(10\)", "true"), (r"if \(!spans\) return", "return")],
}  # fmt: skip
# Opcodes by what they are for; the rest is "other": addresses, loops, barriers.
CLASSES = {
    "loads": r"LDSM|LDS", "copies": r"LDGSTS|LDGDEPBAR", "exp2": r"MUFU", "rounding": r"F2FP|F2F",
    "sums": r"FADD2?|FMUL2?|FFMA2?|DADD|DMUL|DFMA|FMNMX3?|FSEL|DSETP|FSETP", "moves": r"MOV|SHFL|PRMT|SEL|R2UR|UMOV",
}  # fmt: skip


def straight(folder):
    """A copy of the sources whose loop has nothing but what it does nearly always."""
    for source in registry.SOURCES.glob("*.cu*"):
        text = source.read_text()
        for pattern, instead in STRAIGHT.get(source.name, ()):
            text, times = re.subn(pattern, instead, text)
            assert times, f"{source.name} has no {pattern}"
        (folder / source.name).write_text(text)


def disassembled(row, arch, folder):
    """A kernel's instructions and labels, in order."""
    source, cubin = folder / "one.cu", folder / "one.cubin"
    source.write_text(f'#include "{folder / row.file}"\n{instantiation(row.name, LARGE[row.kind])}')
    subprocess.run([NVCC, "-std=c++17", "-O3", "-ftz=true", "-cubin", f"-arch=sm_{arch}", str(source), "-o", str(cubin)], check=True)
    text = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^(\.L_x_\d+):|\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)\S*(.*?);", text, re.M)


def loop(code, row):
    """The opcodes of the loop with most of its products: from a label to the last branch back to it."""
    labels = {label: at for at, (label, _, _) in enumerate(code) if label}
    found = []
    for at, (_, opcode, operands) in enumerate(code):
        to = re.search(r"\.L_x_\d+", operands) if opcode == "BRA" else None
        if to and labels[to.group(0)] < at:
            found.append([opcode for _, opcode, _ in code[labels[to.group(0)] : at + 1] if opcode])
    return max(found, key=lambda opcodes: sum(opcode == row.instruction for opcode in opcodes))


def counted(opcodes, product):
    """How many instructions of each class, and how many besides one of the products."""
    others = [opcode for opcode in opcodes if opcode != product]
    of = (next((name for name, pattern in CLASSES.items() if re.fullmatch(pattern, opcode)), "other") for opcode in others)
    count = collections.Counter(of)
    products = len(opcodes) - len(others)
    return {"products": products, **{name: count[name] for name in (*CLASSES, "other")}, "others_a_product": len(others) / products}


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=registry.TYPES)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head_dim")
    parser.add_argument("--arch", type=int, default=90, choices=registry.ARCHITECTURES)
    args = parser.parse_args()
    table, folder = Table(args.json), Path(tempfile.mkdtemp())
    try:
        straight(folder)
        for dtype in args.dtypes:
            for dim in args.dims:
                for row in (registry.find(kind, dtype, dim, dim) for kind in KINDS):
                    opcodes = loop(disassembled(row, args.arch, folder), row)
                    table.row(kernel=row.kind, dtype=dtype, dim=row.dim, arch=args.arch, **counted(opcodes, row.instruction))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
