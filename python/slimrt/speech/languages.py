"""The languages of Whisper: ISO 639 codes and English names, in the order of its vocabulary."""

from slimrt.modelfile.hf.vocabulary_whisper import LANGUAGES as CODES

_NAMES = """
    english, chinese, german, spanish, russian, korean, french, japanese, portuguese, turkish, polish, catalan,
    dutch, arabic, swedish, italian, indonesian, hindi, finnish, vietnamese, hebrew, ukrainian, greek, malay, czech,
    romanian, danish, hungarian, tamil, norwegian, thai, urdu, croatian, bulgarian, lithuanian, latin, maori,
    malayalam, welsh, slovak, telugu, persian, latvian, bengali, serbian, azerbaijani, slovenian, kannada, estonian,
    macedonian, breton, basque, icelandic, armenian, nepali, mongolian, bosnian, kazakh, albanian, swahili,
    galician, marathi, punjabi, sinhala, khmer, shona, yoruba, somali, afrikaans, occitan, georgian, belarusian,
    tajik, sindhi, gujarati, amharic, yiddish, lao, uzbek, faroese, haitian creole, pashto, turkmen, nynorsk,
    maltese, sanskrit, luxembourgish, myanmar, tibetan, tagalog, malagasy, assamese, tatar, hawaiian, lingala,
    hausa, bashkir, javanese, sundanese, cantonese
"""
LANGUAGES = dict(zip(CODES, map(str.strip, _NAMES.split(",")), strict=True))
"""Code -> English name."""

# Further names that openai/whisper accepts.
_ALIASES = {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
}


def code_of(language: str) -> str:
    """The code of a language given by code or English name, in any case; unknown names are returned unchanged."""
    asked = language.lower()
    named = next((code for code, name in LANGUAGES.items() if asked in (code, name)), language)
    return _ALIASES.get(asked, named)
