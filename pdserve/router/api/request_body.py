"""What the router reads of a request's body, JSON or a form: only what planning needs.

`RequestView` decodes a few fields. msgspec checks the syntax of everything else and drops it; `messages` and
`prompt` stay raw bytes. The worker gets the body byte for byte, so parameters that the router does not know
work.

Requests whose answers say more of a prompt than a worker knows that got the prompt's KV from another one.

After a direct hand-off, SGLang's decode worker has the KV and the first token, and no more. Log-probabilities
of prompt tokens, hidden states and the like stayed at the prefill worker. Prompts with media, and sessions
that SGLang itself keeps, are left to workers that compute prompts as well: they were not tried.

What the router reads of a form (multipart/form-data, RFC 7578): a few short fields. Pure.

The worker gets the form byte for byte. Only `model` and `stream` are read, and they decide nothing but which
model's workers are asked, and how long their answer may take. Files are stepped over, not copied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from pdserve.errors import RequestError
from pdserve.router.native.scan import has_after

BYTES_PER_TOKEN = 4
"""Rule of thumb for natural-language text and the usual tokenizers. Estimates only decide placement."""
BYTES_PER_TOKEN_ID = 6
"""A token id of a vocabulary of about 100,000, with comma and blank."""
_EMPTY = msgspec.Raw(b"")


class RequestView(msgspec.Struct, gc=False):
    """The fields of a request to any endpoint that planning looks at."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    text: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    previous_response_id: str | None = None
    query: msgspec.Raw = _EMPTY
    documents: msgspec.Raw = _EMPTY
    items: msgspec.Raw = _EMPTY
    input_embeds: msgspec.Raw = _EMPTY
    image_data: msgspec.Raw = _EMPTY
    video_data: msgspec.Raw = _EMPTY
    audio_data: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    prompt_cache_key: msgspec.Raw = _EMPTY
    metadata: msgspec.Raw = _EMPTY
    diagnostics: msgspec.Raw = _EMPTY
    kv_hints: msgspec.Raw = _EMPTY
    prompt_cache_retention: msgspec.Raw = _EMPTY
    cache_salt: msgspec.Raw = _EMPTY
    n: msgspec.Raw = _EMPTY
    best_of: msgspec.Raw = _EMPTY
    sampling_params: msgspec.Raw = _EMPTY
    priority: msgspec.Raw = _EMPTY
    echo: msgspec.Raw = _EMPTY
    logprob_start_len: msgspec.Raw = _EMPTY
    return_hidden_states: msgspec.Raw = _EMPTY
    return_routed_experts: msgspec.Raw = _EMPTY
    return_indexer_topk: msgspec.Raw = _EMPTY
    return_sampling_mask: msgspec.Raw = _EMPTY
    return_entropy: msgspec.Raw = _EMPTY
    session_id: msgspec.Raw = _EMPTY
    session_params: msgspec.Raw = _EMPTY
    positional_embed_overrides: msgspec.Raw = _EMPTY

    def prompt_json(self, fields: Iterable[str]) -> msgspec.Raw:
        """The prompt as it stands in the body: messages, text, token ids, or a list of prompts. The first of
        `fields` that is given counts (see `Endpoint.prompt_fields`); empty where none is.
        """
        for name in fields:
            said: msgspec.Raw = getattr(self, name)
            if said and not _NOTHING.fullmatch(said):
                return said
        return _EMPTY


_about_prompt: Final = attrgetter(
    *RequestView.__struct_fields__[RequestView.__struct_fields__.index("echo") :],
    *("input_embeds", "image_data", "video_data", "audio_data"),
)
"""The fields by which SGLang (0.5.23) is asked about a prompt. They are off with a value of `_OFF`."""
BOM = b"\xef\xbb\xbf"
"""Some clients put it before JSON. RFC 8259 allows to pass it over; msgspec and workers do not."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, of another form, or nested too deeply."""
T = TypeVar("T")
_decoder = msgspec.json.Decoder(RequestView)
decode_request = _decoder.decode
"""As `parse_request`, but raises `UNREADABLE`."""


class _Sampling(msgspec.Struct, gc=False):
    n: msgspec.Raw = _EMPTY


MAX_COUNT = 1e9
_SPACE = b" \t\r\n"
_OPENS, _CLOSES = b"{}"


class _Object(msgspec.Struct, gc=False):
    """Any JSON object."""


_objects_decoder = msgspec.json.Decoder(list[_Object])
_sampling_decoder = msgspec.json.Decoder(_Sampling | list[_Sampling | None] | None)
MAX_MEDIA = 1000
MAX_MEMBERS = 20_000
MAX_OBJECTS = 200_000
MAX_SAMPLING_BYTES = 4 * 1024 * 1024
MAX_NUMBER_CHARS = 64
_number_decoder = msgspec.json.Decoder(float | str | None)
_PROMPT = re.compile(rb'\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\[\]]*+\])\s*+,?', re.DOTALL)
"""One prompt of a list: text, or token ids. Possessive: otherwise each escape of a text takes memory."""
_TOKEN_IDS = re.compile(rb"[\[\s]+\d")
_NOTHING = re.compile(rb'null|""|\[\s*\]')
_MEDIA = re.compile(rb'"(?:[iva](?:mage|ideo|udio)_url|input_(?:audio|image))"\s*:')
"""In a text the second quote would be written with a backslash."""
_MEDIA_NAMES: Final = b'image_url"', b'video_url"', b'audio_url"', b'input_audio"', b'input_image"'
"""What is looked for first, since it takes a tenth of the time."""
_PROMPTS = re.compile(rb"\s*\[\s*[\[\"]")
_MESSAGES = memoryview(b'[{"')
CHAT_FIELDS: Final = ("input_ids", "messages")
"""The beginning of messages, as nearly all write them."""
_OBJECTS = re.compile(rb"\s*\[\s*\{")
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..(?<!\\u[dD][89abAB]..\\u[dD]...))", re.DOTALL
)
_FIELD = re.compile(r" - at `\$\.(?P<field>[A-Za-z_]+)[^`]*`$")


def parse_request(body: bytes) -> RequestView:
    """The request in `body`. Raises RequestError (400) for anything but a JSON object of that form."""
    return decode_view(_decoder, body)


def decode_view(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """`body` as the decoder has it. Raises RequestError (400)."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        if match is None:
            raise RequestError(400, "The request body must be a JSON object.") from None
        what = str(error)[: match.start()].replace("`", "")
        raise RequestError(
            400, f"Invalid value for '{match['field']}': {what}.", param=match["field"]
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = ""
        if _HALF.search(body):
            hint = " It seems to have a half of a surrogate pair, as a text has that was cut inside an emoji."
        raise RequestError(400, f"The request body is not valid JSON: {error}.{hint}") from None
    except RecursionError:
        raise RequestError(400, "The request body is nested too deeply.") from None


def with_member(body: bytes, name: str, value: object) -> bytes:
    """The JSON object `body` with a member added at its end. Of a name that comes twice the last one counts,
    for the router's parser and the workers'.
    """
    return with_members(body, {name: value})


def with_members(body: bytes, members: Mapping[str, object]) -> bytes:
    """As `with_member`, for several: the body is copied once."""
    return with_text(body, msgspec.json.encode(members)[1:])


def with_text(body: bytes, members: bytes) -> bytes:
    """As `with_members`, for members as JSON has them, with the closing brace behind them."""
    if body[-1] != _CLOSES or body[-2] in _SPACE:
        body = body.rstrip(_SPACE)[:-1].rstrip(_SPACE) + b"}"
    return b"".join((memoryview(body)[:-1], b"" if body[-2] == _OPENS else b",", members))


def bytes_per_token(prompt_json: bytes) -> int:
    """Roughly how many bytes of the prompt's JSON make a token: fewer for text than for token ids."""
    return BYTES_PER_TOKEN_ID if _TOKEN_IDS.match(prompt_json) else BYTES_PER_TOKEN


def has_media(view: RequestView) -> bool:
    """The prompt has images, videos or sound. By the spelling of the members that hold them, undecoded: only
    placement rests on it.
    """
    for said in (view.image_data, view.video_data, view.audio_data):
        if said and not _NOTHING.fullmatch(said):
            return True
    return _names_media(view.messages) or _names_media(view.input)


def _names_media(json: msgspec.Raw) -> bool:
    return bool(json) and has_after(json, b'"', _MEDIA_NAMES) and _MEDIA.search(json) is not None


def estimate_prompt_tokens(prompt_json: bytes, *, may_be_media: bool = True) -> int:
    """Roughly how many tokens the prompt has, from the length of its JSON.

    Media in `data:` URLs count nothing: how many tokens an image has depends on the model, not on its bytes.
    """
    size = len(prompt_json)
    if may_be_media:
        text = bytes(prompt_json)
        if b";" in text and b";base64," in text:  # a single byte is looked for ten times as fast
            size -= _inline_media_bytes(text)
    return size // (BYTES_PER_TOKEN_ID if _TOKEN_IDS.match(prompt_json) else BYTES_PER_TOKEN)


def read_prompt(
    view: RequestView, fields: tuple[str, ...], *, may_be_media: bool
) -> tuple[msgspec.Raw, bool, int]:
    """The prompt, see `RequestView.prompt_json`; whether it is a list of prompts, also of a single one; and
    an estimate of its tokens.
    """
    said = view.messages
    if said and not view.input_ids and fields == CHAT_FIELDS and memoryview(said)[:3] == _MESSAGES:
        if may_be_media:  # messages, as nearly all are written
            return said, False, estimate_prompt_tokens(said)
        return said, False, len(said) // BYTES_PER_TOKEN
    said = view.prompt_json(fields)
    return said, has_several_prompts(said), estimate_prompt_tokens(said, may_be_media=may_be_media)


def _inline_media_bytes(text: bytes) -> int:
    """Of the first `MAX_MEDIA` texts in base64, in linear time."""
    found = at = 0
    for _ in range(MAX_MEDIA):
        begin = text.find(b";base64,", at)
        if begin < 0:
            break
        at = text.find(b'"', begin)
        if at < 0:
            break
        found += at - begin
    return found


def has_several_prompts(prompt_json: bytes) -> bool:
    """The prompt is a list of prompts, also of a single one."""
    return _PROMPTS.match(prompt_json) is not None


def is_crowded(json: bytes) -> bool:
    """A list or object has so many members that making an object of each would hold up everybody."""
    text = bytes(json)
    if text.count(b",") <= MAX_MEMBERS:
        return False
    if text.count(b"{") > MAX_OBJECTS:
        return True
    try:
        _objects_decoder.decode(text)  # a few objects with much text
    except UNREADABLE:
        return True
    return False


def count_prompts(prompt_json: bytes, at_most: int, *, may_be_objects: bool = False) -> int:
    """How many prompts a request has. It stops counting at `at_most` + 1: a body may hold millions.
    `may_be_objects`: each object of a list is a prompt, and not a message.
    """
    text = bytes(prompt_json)
    if may_be_objects and _OBJECTS.match(text):
        return at_most + 1 if is_crowded(text) else _count_objects(text)
    if not has_several_prompts(text):
        return 1
    count, at = 0, text.index(b"[") + 1
    while count <= at_most and (found := _PROMPT.match(text, at)) is not None:
        count, at = count + 1, found.end()
    return max(1, count)


def _count_objects(text: bytes) -> int:
    try:
        return max(1, len(_objects_decoder.decode(text)))
    except UNREADABLE:
        return 1  # the worker refuses it


def count_candidates(view: RequestView, sampling_field: str) -> int:
    """How many answers to each prompt may be computed. `sampling_field`: see `Endpoint`."""
    choices = count_choices(view, sampling_field)
    return choices if sampling_field else max(choices, _number(view.best_of))


def count_choices(view: RequestView, sampling_field: str) -> int:
    """How many answers a request gets to each prompt."""
    if not sampling_field:
        return _number(view.n)
    if not view.sampling_params:
        return 1
    if len(bytes(view.sampling_params)) > MAX_SAMPLING_BYTES:
        return int(MAX_COUNT)  # so many objects are not made only to be counted
    try:
        sampling = _sampling_decoder.decode(view.sampling_params)
    except UNREADABLE:
        return 1  # the worker refuses it
    every = sampling if isinstance(sampling, list) else [sampling]
    return max([1, *(_number(one.n) for one in every if one is not None)])


def _number(said: msgspec.Raw) -> int:
    """A count as workers read it: also `2.0`, `2e0`, `"2"` and `" 1_000 "`. At least 1."""
    if not said:
        return 1
    if len(said) > MAX_NUMBER_CHARS:
        return int(MAX_COUNT)
    try:
        number = float(_number_decoder.decode(said) or 1)
    except (*UNREADABLE, ValueError):
        return 1  # the worker refuses it
    return 1 if math.isnan(number) else max(1, int(min(number, MAX_COUNT)))


_OFF: Final = frozenset((b"", b"null", b"false", b"-1", b"[]"))
_MEDIA_FIELDS: Final = re.compile(
    rb'"(?:(?:image|video|audio)_url|input_audio|image|video|audio|source)"\s*:'
)
"""A member of a message's part. In a text its quotes would be written with a backslash."""
_PART_NAMES: Final = (*_MEDIA_NAMES, b'image"', b'video"', b'audio"', b'source"')


def asks_about_prompt(view: RequestView) -> bool:
    """Whether the request needs a worker that computes its prompt."""
    if any(bytes(said) not in _OFF for said in _about_prompt(view) if said):
        return True
    return has_after(view.messages, b'"', _PART_NAMES) and _MEDIA_FIELDS.search(view.messages) is not None


MAX_PARTS: Final = 64
MAX_HEAD_BYTES: Final = 4096
MAX_FIELD_BYTES: Final = 1024
_BOUNDARY: Final = re.compile(
    rb'multipart/form-data\s*;(?:[^;]*;)*?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE
)
_NAME: Final = re.compile(
    rb'content-disposition\s*:\s*form-data\s*;(?:[^\r\n]*?;)?\s*name="([^"\r\n]*)"', re.IGNORECASE
)
_IS_FILE: Final = re.compile(rb"[;\s]filename\*?=", re.IGNORECASE)
TRUE: Final = frozenset(("1", "true", "t", "yes", "y", "on"))
"""What SGLang's form takes for true, in any case."""


def read_form(body: bytes, content_type: bytes) -> dict[str, str]:
    """The short text fields of a form; of a name that comes twice the last counts. Raises RequestError (400)
    for what is no form, or has too many parts.
    """
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise RequestError(400, "The body must be a form: multipart/form-data with a boundary.")
    line = b"--" + (found[1] or found[2])
    if not body.startswith(line):
        raise RequestError(400, "The form does not begin with its boundary.")
    fields: dict[str, str] = {}
    at = len(line)
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return fields
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = body.find(b"\r\n" + line, max(at, head_end))
        if head_end < 0 or end < 0:
            raise RequestError(400, "The form is cut short, or the head of a part is too long.")
        head, value_at = body[at:head_end], head_end + 4
        name = _NAME.search(head)
        if name is not None and not _IS_FILE.search(head) and end - value_at <= MAX_FIELD_BYTES:
            fields[name[1].decode("utf-8", "replace")] = body[value_at:end].decode("utf-8", "replace")
        at = end + 2 + len(line)
    raise RequestError(400, f"The form has more than {MAX_PARTS} parts.")
