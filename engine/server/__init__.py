"""The HTTP face of the engine: OpenAI's routes over an `EngineClient`. Knows tokens and text, no tensor."""
