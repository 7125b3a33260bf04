"""What a request is refused with, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re

from slimrt.errors import ContextOverflowError, DeviceError, SlimrtError
from slimrt.generation.options import GenerateOptions
from slimrt.openai.requests import TOOLS
from slimrt.openai.responses import Json

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_NAMES = {*GenerateOptions.__annotations__, *TOOLS, "messages", "response_format"}


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: for programs, such as "context_length_exceeded".
        param: the part of the request that is wrong.
        retry_after: seconds after which it may go better; None: it will not.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, *, param: str | None = None,
        retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def json(self) -> Json:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Those that belong to it."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:  # a browser asks for a password then, and a key is one
            found["www-authenticate"] = 'Basic realm="slimrt: any name, the key as the password"'
        return found


def refusal_of(error: Exception, param: str | None = None, schema_field: str = "json_schema") -> Refusal:
    """What a request is refused with for an error of the library: the client's fault, or ours, of which it is not told
    more. param: the field at fault, unless the error begins with the name of an option. schema_field: that in which the
    request has its json_schema."""
    if isinstance(error, Refusal):
        return error
    if (named := re.match(r"\w+", str(error))) and named[0] in _NAMES:
        param = schema_field if named[0] == "json_schema" else named[0]
    if isinstance(error, ContextOverflowError):
        return Refusal(400, str(error), "context_length_exceeded", param=param)
    if isinstance(error, (SlimrtError, ValueError, TypeError)) and not isinstance(
        error, (OSError, MemoryError, DeviceError)
    ):
        return Refusal(400, str(error), "invalid_value", param=param)
    return Refusal(500, f"the server failed at this request ({type(error).__name__}); its log says more", "internal")
