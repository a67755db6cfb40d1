"""Documents to token ids, exactly as a server renders them: the prompt by the chat template, then the answer."""

from __future__ import annotations

from models.kimi_k25.training.documents import Document


class Renderer:
    """Joins the project's own chat template and tokenizer.

    A conversation's last assistant message is what the model has to write after the generation prompt. Earlier turns
    are history, rendered by the template's rules, so with a tool loop still running they keep their reasoning.
    """

    def __init__(self, template, tokenizer):
        self.template, self.tokenizer = template, tokenizer
        special = tokenizer.special_tokens
        self._assistant, self._middle, self._end = (
            special[name] for name in ("<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
        )
        self._think, self._no_think = special["<think>"], special["</think>"]
        self._eos = special["[EOS]"]

    def prompt_text(self, document: Document) -> str:
        """What the server would send to the model before the last answer."""
        return self.template.render(document.messages[:-1], document.tools, thinking=document.thinking)

    def text(self, document: Document) -> str:
        """The whole conversation as text, from the first header to the `<|im_end|>` of the last answer."""
        last = document.messages[-1]
        opened = f"{last.get('reasoning_content', '')}</think>" if document.thinking else ""
        return f"{self.prompt_text(document)}{opened}{last['content']}<|im_end|>"

    def encode(self, document: Document) -> tuple[list[int], list[bool]]:
        """(ids, whether each is written by the model). Prose ends with `[EOS]` and has no answer."""
        if document.text is not None:
            ids = [*self.tokenizer.encode(document.text), self._eos]
            return ids, [False] * len(ids)
        ids = self.tokenizer.encode(self.text(document), allow_special=True)
        return ids, self._answers(ids)

    def _answers(self, ids: list[int]) -> list[bool]:
        """True from behind `<think>` (or `<think></think>`) of every assistant turn to its `<|im_end|>`."""
        written, inside, assistant = [], False, False
        for i, token in enumerate(ids):
            if token == self._assistant:
                assistant = True
            opened = token == self._think and i and ids[i - 1] == self._middle
            closed = token == self._no_think and i and ids[i - 1] == self._think
            written.append(inside and not closed)
            if assistant and opened:
                inside = True
            if token == self._end:
                inside = assistant = False
        return written
