"""A model behind OpenAI's HTTP interface: `slimrt serve`. Needs the extra `serve`."""
