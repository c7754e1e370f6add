"""The page as a widget of Jupyter, marimo and whatever else shows anywidget's."""

from typing import Any

import anywidget
import traitlets

from diff_transformer.explorer.explorer import Explorer
from diff_transformer.explorer.page import BUNDLE
from diff_transformer.utils.suggestions import quoted


class ExplorerWidget(anywidget.AnyWidget):
    """Shows an explorer in a notebook. The page asks by messages, which the notebook's kernel answers."""

    _esm = (BUNDLE / "explorer.js").read_text(encoding="utf-8")
    _css = (BUNDLE / "explorer.css").read_text(encoding="utf-8")
    described = traitlets.Dict().tag(sync=True)

    def __init__(self, explorer: Explorer) -> None:
        super().__init__(described=explorer.describe())
        self.explorer = explorer
        self.on_msg(self._answer)

    def _answer(self, _: Any, message: Any, buffers: Any) -> None:
        reply = {"id": message["id"]}
        ask = self.explorer.questions.get(message["name"])
        try:
            if ask is None:
                raise ValueError(f"There is no question {quoted(message['name'], 40)}.")
            answer = ask(message["question"])
        except ValueError as error:
            self.send({**reply, "error": str(error)})
            return
        except BaseException as error:  # an interruption, too: the page waits for an answer to each of its questions
            self.send({**reply, "error": f"The explorer failed at this: {type(error).__name__} {error}".rstrip()})
            raise
        if isinstance(answer, bytes):
            self.send(reply, buffers=[answer])
        else:
            self.send({**reply, "answer": answer})
