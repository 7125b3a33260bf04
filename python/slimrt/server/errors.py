"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re

from slimrt.errors import ContextOverflowError, DeviceError, SlimrtError
from slimrt.forecast.options import PredictOptions
from slimrt.generation.options import GenerateOptions
from slimrt.openai.requests import TOOLS
from slimrt.openai.responses import Json

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_NAMES = {
    *GenerateOptions.__annotations__, *TOOLS, "messages", "response_format", "source", "target", "language",
    *PredictOptions.__annotations__, "prediction_length", "quantile_levels",
}  # fmt: skip


class Refusal(Exception):
    """An error response.

    Args:
        status: HTTP status.
        code: machine-readable, such as "context_length_exceeded".
        param: the field of the request that is wrong.
        retry_after: seconds after which a retry may succeed; None: a retry is useless.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, *, param: str | None = None,
        retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def json(self) -> Json:
        """The body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers besides the usual ones."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:  # makes a browser ask for a password, which may be the key
            found["www-authenticate"] = 'Basic realm="slimrt: any name, the key as the password"'
        return found


def wrong(param: str, message: str, code: str = "invalid_value") -> Refusal:
    """400: this field of the request is wrong."""
    return Refusal(400, message, code, param=param)


def timed_out(seconds: float, code: str) -> Refusal:
    """503 for a request that was not processed within a time limit. code: the limit's."""
    message = f"the request was not processed within {seconds:g} s"
    return Refusal(503, message, code, retry_after=max(round(seconds), 1))


def refusal_of(error: Exception, param: str | None = None, schema_field: str = "json_schema") -> Refusal:
    """The response for an exception of the library: 400 if the request is at fault, else 500 without details.

    param: the field at fault, unless the message begins with the name of an option. schema_field: the field that holds
    the request's json_schema."""
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
    return Refusal(500, f"the server failed on this request ({type(error).__name__}); its log says more", "internal")
