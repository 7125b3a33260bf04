"""An HTTP server with OpenAI's API for one model: `slimrt serve`. Needs the extra `serve`."""
