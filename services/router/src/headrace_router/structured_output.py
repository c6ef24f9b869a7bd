"""What form an answer must have, as clients of OpenAI's API and of other open servers ask for it. Pure.

Whether the form makes sense is found out by `grammar_checks.py`; here only one is chosen, and its size is bounded.
"""

import json
import re
from typing import Any, Literal, NamedTuple

from headrace_router.schemas import GenerationBody, ResponseFormat, StructuredOutputs
from headrace_shared.errors import InvalidRequest
from headrace_shared.grammars import MAX_GRAMMAR_BYTES

FormKind = Literal["json", "regex", "choice", "grammar"]

MAX_CHOICES = 1000
ANY_OBJECT = '{"type":"object"}'
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class OutputForm(NamedTuple):
    kind: FormKind
    text: str
    """A JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark or GBNF notation."""
    param: str
    """The field that asks for it."""


def output_form(body: GenerationBody) -> OutputForm | None:
    """None: any text will do. Raises InvalidRequest."""
    forms = _of_format(body.response_format) + _of_structured(body.structured_outputs)
    forms += [OutputForm("regex", body.regex, "regex")] if body.regex is not None else []
    forms += [OutputForm("grammar", body.ebnf, "ebnf")] if body.ebnf is not None else []
    if not forms:
        return None
    form = forms[0]
    if len(forms) > 1:
        raise InvalidRequest(f"'{forms[1].param}' cannot be combined with '{form.param}'.", param=forms[1].param)
    if not form.text:
        raise InvalidRequest(f"'{form.param}' must not be empty.", param=form.param)
    check_size(form)
    # The form ends with the end of the sequence, and says itself when that may come.
    for name, is_wanted in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if is_wanted:
            raise InvalidRequest(f"'{name}' cannot be combined with '{form.param}'.", param=name)
    return form


def check_size(form: OutputForm) -> None:
    """Raises InvalidRequest."""
    if len(form.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"'{form.param}' may have at most {MAX_GRAMMAR_BYTES} bytes.", param=form.param)


def _of_format(given: ResponseFormat | None) -> list[OutputForm]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        if given.schema_ is not None:
            return [OutputForm("json", _dump(given.schema_), "response_format.schema")]
        return [OutputForm("json", ANY_OBJECT, "response_format")]
    if given.type != "json_schema":
        raise InvalidRequest(
            "'response_format.type' must be 'text', 'json_object' or 'json_schema'.", param="response_format.type"
        )
    param = "response_format.json_schema"
    schema = given.json_schema
    if schema is None:
        raise InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
    if not NAME.fullmatch(schema.name):
        raise InvalidRequest(
            f"'{param}.name' must have 1 to 64 characters out of a-z, A-Z, 0-9, _ and -.", param=f"{param}.name"
        )
    return [OutputForm("json", _dump(schema.schema_ or {}), f"{param}.schema")]


def _of_structured(given: StructuredOutputs | None) -> list[OutputForm]:
    if given is None:
        return []
    if extra := sorted(given.model_extra or {}):
        param = f"structured_outputs.{extra[0][:64]}"
        raise InvalidRequest(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
    forms: list[OutputForm] = []
    if given.json_ is not None:
        text = given.json_ if isinstance(given.json_, str) else _dump(given.json_)
        forms.append(OutputForm("json", text, "structured_outputs.json"))
    if given.json_object:
        forms.append(OutputForm("json", ANY_OBJECT, "structured_outputs.json_object"))
    if given.regex is not None:
        forms.append(OutputForm("regex", given.regex, "structured_outputs.regex"))
    if given.grammar is not None:
        forms.append(OutputForm("grammar", given.grammar, "structured_outputs.grammar"))
    if given.choice is not None:
        param = "structured_outputs.choice"
        if not 1 <= len(given.choice) <= MAX_CHOICES or "" in given.choice:
            raise InvalidRequest(f"'{param}' must have 1 to {MAX_CHOICES} strings, none empty.", param=param)
        forms.append(OutputForm("choice", _dump(given.choice), param))
    if not forms:
        raise InvalidRequest("'structured_outputs' must say what is wanted.", param="structured_outputs")
    return forms


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
