"""How much a call may ask for. The schemas document these bounds; `validation.py` and those beside it keep them."""

MAX_CHOICES = 16
MAX_PROMPTS = 128
MAX_SEQUENCES = 256
"""prompts x choices of one call."""
MAX_STREAM_INTERVAL = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_SCORES = 1 << 18
"""Log-probabilities of the tokens of a call's prompts: they pass through the broker and are one answer."""

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKENS = 16_384
MAX_NAMED_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128

MAX_ADAPTER_PATH_CHARS = 1024

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0

MAX_NAME_CHARS = 1024
MAX_METADATA_BYTES = 16 * 1024
MAX_SALT_CHARS = 128
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
