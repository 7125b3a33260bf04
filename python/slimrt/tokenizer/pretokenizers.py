"""The pre-tokenizers that a GGUF can name in `tokenizer.ggml.pre`, as in those models' published tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from slimrt.errors import UnsupportedError
from slimrt.plumbing.notes import note

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_SLASHED_PUNCTUATION_AND_SPACE}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED_PUNCTUATION_AND_SPACE}"
)
_KIMI_LETTERS = [f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER)]
_KIMI_K2 = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_LETTERS[0]}*{_KIMI_LETTERS[1]}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_LETTERS[0]}+{_KIMI_LETTERS[1]}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _GPT4O.replace("{1,3}", ""),
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split at each pattern in turn, then map bytes to the byte-level alphabet."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


@dataclass(frozen=True)
class PreTokenizer:
    """The properties of a byte-level BPE tokenizer that follow from its pre-tokenizer's name.

    Attributes:
        splitter: splits text into words and maps them to the byte-level alphabet.
        nfc: the text is normalised to Unicode NFC first.
        ignore_merges: a word that is itself a token becomes that token, whatever the merges say.
        add_bos: BOS is added if the file does not say.
    """

    splitter: pre_tokenizers.PreTokenizer
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _table() -> dict[str, PreTokenizer]:
    gpt2 = PreTokenizer(_gpt2())
    gpt2_nfc = PreTokenizer(_gpt2(), nfc=True)
    digits = PreTokenizer(_digits_then_gpt2())
    llama3 = PreTokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True)
    llama3_merged = PreTokenizer(_split(_LLAMA3))
    gpt4o = PreTokenizer(_split(_GPT4O))
    qwen2 = PreTokenizer(_split(_QWEN2))
    bloom = PreTokenizer(_split(_BLOOM))
    deepseek_v3 = PreTokenizer(_split(*_DEEPSEEK_V3))
    return {
        "gpt-2": gpt2,
        "phi-2": gpt2,
        "exaone4": gpt2,
        "a.x-4.0": gpt2,
        "gigachat": gpt2,
        "granite-docling": gpt2,
        "mellum": gpt2,
        "trillion": gpt2,
        "mpt": gpt2_nfc,
        "olmo": gpt2_nfc,
        "starcoder": digits,
        "refact": digits,
        "codeshell": digits,
        "smollm": digits,
        "minerva-7b": digits,
        "command-r": PreTokenizer(_digits_then_gpt2(), nfc=True),
        "falcon": PreTokenizer(_falcon()),
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "falcon3": llama3,
        "lfm2": llama3,
        "midm-2.0": llama3,
        "pixtral": llama3,
        "minicpm5": PreTokenizer(_split(r"\p{N}{1,3}", _LLAMA3), ignore_merges=True),
        "dbrx": llama3_merged,
        "smaug-bpe": llama3_merged,
        "chatglm-bpe": llama3_merged,
        "glm4": PreTokenizer(_split(_LLAMA3), ignore_merges=True),
        "qwen2": PreTokenizer(_split(_QWEN2), nfc=True),
        "deepseek-r1-qwen": qwen2,
        "stablelm2": qwen2,
        "kormo": qwen2,
        "f2llmv2": qwen2,
        "megrez": qwen2,
        "seed-coder": PreTokenizer(_split(_SEED_CODER)),
        "qwen35": PreTokenizer(_split(_QWEN35)),
        "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
        "gpt-4o": gpt4o,
        "llama4": gpt4o,
        "minimax-m2": gpt4o,
        "kanana2": gpt4o,
        "tiny_aya": PreTokenizer(_split(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
        "kimi-k2": PreTokenizer(_split(_KIMI_K2)),
        "youtu": PreTokenizer(_split(*_YOUTU), ignore_merges=True),
        "superbpe": PreTokenizer(_split(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        "bloom": bloom,
        "gpt3-finnish": bloom,
        "poro-chat": bloom,
        "viking": PreTokenizer(_split(_BLOOM, r"\p{N}")),
        "deepseek-llm": PreTokenizer(_split(*_DEEPSEEK_LLM)),
        "deepseek-coder": PreTokenizer(_split(*_DEEPSEEK_CODER)),
        "deepseek-v3": deepseek_v3,
        "joyai-llm": deepseek_v3,
    }


_TABLE = _table()
SUPPORTED = tuple(sorted(_TABLE))


_UNSAID = {
    ("llama", 128256): "llama-bpe",
    ("llama", 102400): "deepseek-llm",
    ("llama", 32256): "deepseek-coder",
    ("stablelm", 100352): "stablelm2",
    "stablelm": "olmo",
    "gptneox": "olmo",
    "olmo": "olmo",
    "gpt2": "gpt-2",
    "phi2": "phi-2",
    "mpt": "mpt",
    "bloom": "bloom",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "command-r": "command-r",
}
"""The pre-tokenizer of an architecture's published models (of those with so many tokens), for files that name none,
which are from before May 2024."""


def lookup(name: str | None, arch: str = "", n_tokens: int = 0) -> PreTokenizer:
    """Return the pre-tokenizer of that name.

    Args:
        name: the value of `tokenizer.ggml.pre`; None when the file has none.
        arch, n_tokens: the model's architecture and the size of its vocabulary, which tell where no name does.

    Raises:
        UnsupportedError: the name is unknown, or missing and not told; a wrong one would silently give other ids.
    """
    said = name not in (None, "default")
    found = name if said else _UNSAID.get((arch, n_tokens), _UNSAID.get(arch))
    if found not in _TABLE:
        unnamed = "the file names no pre-tokenizer (tokenizer.ggml.pre)"
        what = unnamed if name is None else f"unknown pre-tokenizer {name!r}"
        raise UnsupportedError(
            f"{what}; supported: {', '.join(SUPPORTED)}. Convert the model again with a converter that names one of "
            "these, or open the Hugging Face directory with its tokenizer.json"
        )
    if not said:
        note(
            f"the file names no pre-tokenizer (tokenizer.ggml.pre): {found}, that of published {arch} models, is taken"
        )
    return _TABLE[found]
