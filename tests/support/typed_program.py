"""A program of a user, for the type checker alone: right calls pass, and wrong ones are found."""

from __future__ import annotations

from specrun import Engine, GenerationResult, Runtime, SamplingParams


def right() -> GenerationResult:
    """Call what the documents show."""
    messages = [{"role": "user", "content": "hi"}]
    with Runtime("target.gguf", n_ctx=8192, n_gpu_layers="all", devices=["CUDA0"]) as runtime:
        for event in runtime.stream_chat(messages, SamplingParams(temperature=0.8)):
            assert event.origin in ("drafted", "target")
    with Engine("target.gguf", "draft(small.gguf)", slots=4, flash_attention="on") as engine:
        engine.submit_chat(messages, max_tokens=64, top_logprobs=3)
        return engine.generate("Once", max_tokens=8)


def wrong() -> None:
    """Each line has a mistake; a comment that silences none is an error itself."""
    Runtime("target.gguf", n_ctx="abc")  # type: ignore[arg-type]
    Runtime("target.gguf", ctx=8192)  # type: ignore[call-arg]
    Engine("target.gguf", flash_attention="yes")  # type: ignore[arg-type]
    SamplingParams(temp=0.8)  # type: ignore[call-arg]
    runtime = Runtime("target.gguf")
    runtime.generate("Once", max_tokens="3")  # type: ignore[arg-type]
    runtime.generate("Once", temperature=0)  # type: ignore[call-arg]
    runtime.chat("hi")  # type: ignore[arg-type]
