"""What mkdocs calls while it builds the site: it adds generated pages and pictures, and what pages link to."""

from __future__ import annotations

import posixpath
import re
import runpy
from typing import Any

from gallery import ON_PHONES, gallery
from mkdocs.structure.files import File, Files, InclusionLevel
from pages import generated
from repository import DOCS, linked_files, relinked

from penstock.play import page as playground

_LANGUAGE = re.compile(r"^```\w+ .+$", re.MULTILINE)
_PICTURE = re.compile(r'<img [^>]*?src="(?P<name>[^"]+)\.svg"[^>]*>')
_LONG_COMMAND = re.compile(r"^\$ .{100,}$", re.MULTILINE)
_BLOCK = re.compile(
    r'<div class="language-(?P<language>\w+)(?P<more>[^"]*) highlight">(?P<code><pre>.*?</pre>)', re.DOTALL
)
_TAG = re.compile(r"<[^>]*>")
_DRAWN = re.compile(r"\S {3,}(?!#)\S|^.{0,60} ?\|[ .FB]|^ *[|v^][ |v^]*$", re.MULTILINE)
"""What tells a table, a grid or a diagram from sentences and code: columns, the bar after a rank, or an arrow."""
_SENTENCE = re.compile(r"^(?!.*(?:\S {2,}\S|\||[-=]&gt;|&lt;[-=])) *(?:[^<\s]+ ){7,}[^<\s]+$", re.MULTILINE)
"""A line in a block with a drawing or table that has no columns, bars or arrows itself."""
_OPTION = re.compile(r"(?<=[\s>])--?[a-z][\w-]*")
_INLINE_CODE = re.compile(r"<code>(?P<text>[^<\n]+)</code>")
_HYPHENATED = re.compile(r"(?<![^ ])(?=\S*-)\S{2,24}(?![^ ])")
_FRAME = """
<div class="playground" markdown="0">
<p><a class="md-button" href="playground.html" target="_blank">Open the playground in a page of its own</a></p>
<iframe src="playground.html" title="The playground" loading="lazy"></iframe>
<script>
{
  const frame = document.querySelector(".playground iframe");
  const tell = () => {
    const scheme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
    frame.contentWindow.postMessage({ scheme }, "*");
  };
  frame.addEventListener("load", tell);
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}
</script>
</div>
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds all that does not lie in docs/."""
    made, pictures = gallery()
    pages = generated()
    texts = {"gallery.md": made, "playground.html": playground(home="index.html"), **pages}
    texts |= {f"gallery/{name}": picture for name, picture in pictures.items()}
    for script in sorted((DOCS / "images").glob("*.py")):
        narrow = runpy.run_path(str(script))["pictures"](ON_PHONES)
        texts |= {f"images/{name}-phone.svg": text for name, text in narrow.items()}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for name, path in linked_files(pages).items():
        file = File.generated(config, name, abs_src_path=str(path))
        if path.suffix != ".md":
            file.inclusion = InclusionLevel.INCLUDED  # mkdocs leaves out what lies in a folder like .github
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and fences whose language is followed by what tests read."""
    here = page.file.src_uri
    if here == "play.md":
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n{_FRAME}\n{rest}"
    markdown = _LANGUAGE.sub(lambda match: f"```{match[0][3:].split()[0]}", markdown)
    markdown = _LONG_COMMAND.sub(_folded, markdown)
    is_ours = (DOCS / here).is_file() or here.startswith(("repository/", "papers/"))
    return relinked(markdown, here) if is_ours else markdown


def _folded(command: re.Match[str]) -> str:
    """A long command goes on in further lines, as a shell reads them; each begins with an option."""
    lines = [""]
    for part in re.split(" (?=-)", command[0]):
        if len(lines[-1]) + len(part) > 100:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines).strip()


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Narrow screens show the narrow one of a picture that is there twice: `zb.svg` and `zb-phone.svg`.

    A picture that is there once scrolls in a box of its own on them, for shrunk to a phone its numbers are too small.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def with_narrow(match: re.Match[str]) -> str:
        if 'class="thumb"' in match[0]:
            return match[0]
        narrow = f"{match['name']}-phone.svg"
        if files.get_file_from_path(posixpath.normpath(posixpath.join(folder, narrow))) is None:
            return f'<span class="wide-picture">{match[0]}</span>'
        return f'<picture><source media="(max-width: 44.9em)" srcset="{narrow}">{match[0]}</picture>'

    return _INLINE_CODE.sub(_unbroken, _BLOCK.sub(_flowing, _PICTURE.sub(with_narrow, html)))


def _flowing(block: re.Match[str]) -> str:
    """Long lines of a block go on in the next line, unless something is drawn in it. No option is cut at a hyphen."""
    language, code = block["language"], block["code"]
    is_drawn = language not in ("python", "pycon", "sh", "json") and _DRAWN.search(_TAG.sub("", code))
    if is_drawn:
        code = _SENTENCE.sub(r'<span class="sentence">\g<0></span>', code)
    if language != "python":
        code = _OPTION.sub(r'<span class="whole">\g<0></span>', code)
    return f'<div class="language-{language}{block["more"]} highlight{"" if is_drawn else " flows"}">{code}'


def _unbroken(code: re.Match[str]) -> str:
    """Browsers may break a line after a hyphen; short names such as `--out` stay in one piece."""
    whole = _HYPHENATED.sub(r'<span class="whole">\g<0></span>', code["text"])
    return f"<code>{whole}</code>"
