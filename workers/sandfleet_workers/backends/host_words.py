"""The words of a shell command line, near enough for a look at what it names. Pure.

Quotes, escapes, comments, redirections, substitutions and here-documents are understood; nothing is expanded.
The body of a here-document is data and gives no words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["Word", "words_of"]

_BREAKS = ";&|\n()"


@dataclass(frozen=True, slots=True)
class Word:
    """A word without its quotes.

    Attributes:
        text: Its characters; expansions stand as they were written.
        quoted: A part of it was in quotes.
        expands: It holds a ``$`` or a backtick that a shell would act on.
        first: It is the first of its simple command.
        nested: Its command runs in a substitution.
        redirect: It is what ``<`` or ``>`` names.
    """

    text: str
    quoted: bool = False
    expands: bool = False
    first: bool = False
    nested: bool = False
    redirect: bool = False


def words_of(command: str) -> Iterator[Word]:
    """The words in the order they end; those of substitutions after all others.

    Raises:
        RecursionError: Substitutions lie in each other deeper than Python goes.
    """
    return iter(_Lexer(command).run())


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.words: list[Word] = []
        #: Words of substitutions, kept apart so that the command that holds one is not cut in two.
        self.inner: list[Word] = []
        self.heredocs: list[tuple[str, bool]] = []

    def run(self) -> list[Word]:
        while self.at < len(self.text):
            self._commands("", nested=False)
            self.at += 1  # a closing bracket that nothing opened
        return [*self.words, *self.inner]

    def _commands(self, until: str, *, nested: bool) -> None:
        """Words up to the character ``until``, which is left to the caller."""
        first, redirect = True, False
        while self.at < len(self.text):
            char = self.text[self.at]
            if until and char == until:
                return
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n":
                self.at += 1
                self._skip_heredocs()
                first = True
            elif char in _BREAKS:
                self.at += 1
                first, redirect = True, False
            elif char.isspace():
                self.at += 1
            elif char in "<>":
                redirect = self._redirection()
            else:
                word = self._word(until)
                self.words.append(replace(word, first=first, nested=nested, redirect=redirect))
                first, redirect = first and redirect, False

    def _redirection(self) -> bool:
        """Pass a ``<`` or ``>``; whether the next word is the file it names."""
        if self.text.startswith(("<(", ">("), self.at):
            self.at += 2
            self._substitution(")")
            return False
        here_string = self.text.startswith("<<<", self.at)
        if self.text.startswith("<<", self.at) and not here_string:
            self.at += 2
            strip = self.text[self.at : self.at + 1] == "-"
            self.at += strip
            while self.text[self.at : self.at + 1] in (" ", "\t"):
                self.at += 1
            self.heredocs.append((self._word("").text, strip))
            return False
        self.at += 3 if here_string else 1
        return not here_string

    def _skip_heredocs(self) -> None:
        for end, strip in self.heredocs:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = stop + 1
                if (line.lstrip("\t") if strip else line) == end:
                    break
        self.heredocs.clear()

    def _word(self, until: str) -> Word:
        text, quoted, expands = "", False, False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace() or char in _BREAKS or char in "<>" or (until and char == until):
                break
            if char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                text, quoted = text + self.text[self.at + 1 : end], True
                self.at = end + 1
            elif char == '"':
                part, grows = self._double()
                text, quoted, expands = text + part, True, expands or grows
            elif char == "\\":
                text += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif char in "$`":
                text, expands = text + self._expansion(), True
            else:
                text += char
                self.at += 1
        return Word(text, quoted, expands)

    def _double(self) -> tuple[str, bool]:
        self.at += 1
        text, expands = "", False
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                text += following if following in '$`"\\' else char + following
                self.at += 2
            elif char in "$`":
                text, expands = text + self._expansion(), True
            else:
                text += char
                self.at += 1
        self.at += 1
        return text, expands

    def _expansion(self) -> str:
        """Pass ``$…`` or a backtick; the commands of a substitution are words of their own."""
        begin = self.at
        if self.text.startswith("$(", begin):
            self.at += 2
            self._substitution(")")
        elif self.text[begin] == "`":
            self.at += 1
            self._substitution("`")
        elif self.text.startswith("${", begin):
            end = self.text.find("}", begin)
            self.at = len(self.text) if end < 0 else end + 1
            return self.text[begin : self.at]
        else:
            self.at += 1
            return "$"
        return "$()"

    def _substitution(self, until: str) -> None:
        outer, self.words = self.words, []
        self._commands(until, nested=True)
        self.at += 1
        self.inner += self.words
        self.words = outer
