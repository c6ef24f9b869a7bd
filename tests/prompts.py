"""Prompts for comparisons with a reference: short, long (about 500 tokens) and far from English."""

from pydoc_data.topics import topics

SHORT = (
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "def fibonacci(n):",
    "Water boils at",
    "The opposite of hot is",
    "Roses are red,",
    "To make bread you need",
    "The largest planet in the solar system",
    "She opened the door and",
    "import numpy as np\n",
    "In 1969, the first",
    "The three primary colours are",
    "Dear Sir or Madam,",
    "Q: What is 7 times 8?\nA:",
    "a",
)
UNICODE = (
    "Čeština má háčky a čárky:",
    "日本の首都は",
    "안녕하세요, 저는",
    "Привет, как",
    "🦉🦉🦉 owls and 👨‍👩‍👦 families",
    "العربية لغة",
    "naïve café — “quoted” …",
    "∑ x² ≤ ∞ ⇒",
)


def _excerpt(topic: str, num_characters: int) -> str:
    return topics[topic][:num_characters]


LONG = (
    _excerpt("typesseq", 2000),
    _excerpt("strings", 2000),
    _excerpt("with", 1900),
    _excerpt("assignment", 2100),
    _excerpt("specialnames", 2000),
    _excerpt("formatstrings", 1800),
    _excerpt("class", 2000),
    _excerpt("import", 2000),
)
ALL = SHORT + UNICODE + LONG
