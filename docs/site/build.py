"""Makes the site of the documentation, and checks every link of every page.

    python3 docs/site/build.py OUT [--api FOLDER]

OUT is replaced. Pages are the repository's Markdown files. A link leads to another page, to a file of the
repository, or to an address, which is not asked. The menu is made of docs/README.md and has every page.
--api names the folder that `cargo doc` wrote; it is copied to OUT/api. The exit code is 1 if a link leads
nowhere, or if a page is not in the menu. The search is a static index that a script of the site reads.
"""

import argparse
import html
import json
import posixpath
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/tokenyard/tokenyard"
MENU = "docs/README.md"
HEADER = "abi/include/tokenyard_plugin.h"
HEADER_PAGE = "docs/c-header.html"
API = "api/tokenyard_core/index.html"


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def address(page: str) -> str:
    """Where a page lies in the site."""
    folder, name = posixpath.split(page)
    name = "index" if name == "README.md" else name.removesuffix(".md")
    return posixpath.join(folder, name + ".html")


def link_from(page: str, target: str) -> str:
    """A relative link from one place of the site to another."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


class Site:
    """All pages, as tokens, with the anchors that each has."""

    def __init__(self) -> None:
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
        self.files = {name for name in listed.splitlines() if (ROOT / name).exists()}
        self.folders = {str(parent) for name in self.files for parent in Path(name).parents}
        markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        self.markdown = markdown.use(anchors_plugin, max_level=6, slug_func=slug)
        self.pages = {
            name: self.markdown.parse((ROOT / name).read_text())
            for name in sorted(self.files)
            if name.endswith(".md")
        }
        self.anchors = {name: self.anchors_of(tokens) for name, tokens in self.pages.items()}
        self.images: set[str] = set()
        self.broken: list[str] = []

    @staticmethod
    def anchors_of(tokens) -> set[str]:
        found = set()
        for token in tokens:
            if token.type == "heading_open":
                found.add(token.attrs["id"])
            for part in [token, *(token.children or [])]:
                if part.type in ("html_block", "html_inline"):
                    found.update(re.findall(r'\bid="([^"]+)"', part.content))
        return found

    def target(self, page: str, path: str) -> str:
        """The file that a link of a page leads to. A folder with a README stands for that page."""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
        readme = f"{target}/README.md"
        return readme if readme in self.pages else target

    def resolve(self, page: str, href: str) -> str:
        """The link's address in the site. A link that leads nowhere is noted."""
        if re.match(r"[a-z]+:", href):
            return href
        path, _, anchor = href.partition("#")
        target = self.target(page, path) if path else page
        if target in self.pages:
            if anchor and anchor not in self.anchors[target]:
                self.broken.append(f"{page}: {href}: {target} has no such heading")
            place = link_from(address(page), address(target)) if path else ""
            return place + (f"#{anchor}" if anchor else "")
        if target.endswith(".svg") and target in self.files:
            self.images.add(target)
            return link_from(address(page), target)
        if target == HEADER:
            return link_from(address(page), HEADER_PAGE)
        if target in self.files or target in self.folders:
            kind = "blob" if target in self.files else "tree"
            return f"{REPOSITORY}/{kind}/main/{target}"
        self.broken.append(f"{page}: {href}: the repository has no {target}")
        return href

    def rewrite(self, page: str, tokens) -> None:
        for token in tokens:
            for name in ("href", "src"):
                if name in token.attrs:
                    token.attrs[name] = self.resolve(page, str(token.attrs[name]))
            self.rewrite(page, token.children or [])

    def menu(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Each heading of the menu's page with the pages that are linked below it, each once."""
        everything = ("All pages", address(MENU))
        sections: list[tuple[str, list[tuple[str, str]]]] = [("tokenyard", [everything])]
        seen = {MENU}
        tokens = self.markdown.parse((ROOT / MENU).read_text())
        heads = {id(after) for token, after in pairwise(tokens) if token.tag == "h2"}
        for token in tokens:
            if token.type == "inline" and id(token) in heads:
                sections.append((token.content.partition(":")[0], []))
            for part in token.children or []:
                path = str(part.attrs.get("href", "")).partition("#")[0]
                target = self.target(MENU, path)
                if path and target in self.pages and target not in seen:
                    seen.add(target)
                    sections[-1][1].append((self.title(target), address(target)))
        self.broken += [
            f"{page}: {MENU} does not list it" for page in self.pages if page not in seen
        ]
        return [section for section in sections if section[1]]

    def index(self) -> list[list[str]]:
        """An entry for each section of each page: page, heading, address, and its words in lower case."""
        entries: list[list[str]] = []
        for page, tokens in self.pages.items():
            title, place = self.title(page), address(page)
            entry = [title, "", place, ""]
            entries.append(entry)
            for token, before in zip(tokens, [None, *tokens], strict=False):
                if before and before.type == "heading_open" and before.tag in ("h2", "h3"):
                    entry = [
                        title,
                        token.content.replace("`", ""),
                        f"{place}#{before.attrs['id']}",
                        "",
                    ]
                    entries.append(entry)
                elif token.type in ("inline", "fence"):
                    entry[3] += " " + token.content.lower()
        for entry in entries:
            entry[3] = " ".join(dict.fromkeys(re.findall(r"[\w./-]{2,}", entry[3])))
        return entries

    def title(self, page: str) -> str:
        tokens = self.pages[page]
        heads = [
            after.content
            for token, after in pairwise(tokens)
            if token.type == "heading_open" and token.tag == "h1"
        ]
        return heads[0].replace("`", "") if heads else page


def header_page() -> str:
    """The C header as a page: an entry for each thing it defines, in the header's order, and its exports."""
    text, guard, exports = (ROOT / HEADER).read_text().partition("#endif  /* TOKENYARD_PLUGIN_H */")
    preamble = re.match(r"/\*(.*?)\*/", text, re.S)
    if not guard or not preamble:
        sys.exit(f"{HEADER}: found no preamble, or no end of its guard: has its form changed?")
    names: list[str] = []
    out: list[str] = []
    definition = r"^/\*\*\n(.*?)\*/\n(typedef struct .*?^} \w+;|#define .*?$|[^\n]+;)"
    for found in re.finditer(definition, text, re.S | re.M):
        code = found[2]
        name = re.search(r"^} (\w+);", code, re.M) or re.search(
            r"(?:#define|typedef struct) (\w+)", code
        )
        name = name or re.search(r"(\w+)\s*;", code)
        if name:
            names.append(name[1])
            about = html.escape(undecorated(found[1]))
            out.append(f'<h3 id="{name[1]}"><code>{name[1]}</code></h3>')
            out.append(f"<p>{about}</p><pre><code>{html.escape(code)}</code></pre>")
    defined = re.findall(r"^} (\w+);|^#define (TY_\w+)", text, re.M)
    missing = {a or b for a, b in defined} - set(names)
    if len(names) < 50 or missing:
        sys.exit(f"{HEADER}: found {len(names)} definitions, without {sorted(missing)}")
    index = ", ".join(f'<a href="#{name}"><code>{name}</code></a>' for name in names)
    head = [
        f"<h1>{posixpath.basename(HEADER)}</h1>",
        f"<pre>{html.escape(undecorated(preamble[1]))}</pre>",
        f'<p>{index}, <a href="#exports">exports</a></p>',
    ]
    tail = [
        '<h3 id="exports">Exports</h3>',
        f"<pre><code>{html.escape(exports.strip())}</code></pre>",
    ]
    return "\n".join([*head, *out, *tail])


def undecorated(comment: str) -> str:
    return re.sub(r"^ ?\* ?", "", comment, flags=re.M).strip()


def whole(place: str, title: str, body: str, menu) -> str:
    """A page of the site."""
    entries = []
    for heading, links in menu:
        items = "".join(
            f'<li><a href="{link_from(place, target)}"{" class=here" if target == place else ""}>'
            f"{html.escape(name)}</a></li>"
            for name, target in links
        )
        entries.append(f"<h2>{html.escape(heading)}</h2><ul>{items}</ul>")
    template = (ROOT / "docs/site/page.html").read_text()
    for name, value in {
        "title": html.escape(title),
        "menu": "".join(entries),
        "body": body,
        "root": posixpath.relpath(".", posixpath.dirname(place) or ".") + "/",
    }.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--api", type=Path)
    arguments = parser.parse_args()
    site = Site()
    menu = site.menu()
    reference = [("Plugin guide", address("docs/plugin-guide.md")), ("The C header", HEADER_PAGE)]
    if arguments.api:
        reference.append(("Rust", API))
    menu.append(("Reference", reference))
    shutil.rmtree(arguments.out, ignore_errors=True)

    def write(place: str, title: str, body: str) -> None:
        path = arguments.out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole(place, title, body, menu))

    for page, tokens in site.pages.items():
        site.rewrite(page, tokens)
        body = site.markdown.renderer.render(tokens, site.markdown.options, {})
        write(address(page), site.title(page), body)
    write(HEADER_PAGE, "The C header", header_page())
    index = json.dumps(site.index(), separators=(",", ":"))
    (arguments.out / "search-index.js").write_text(f"window.searchIndex={index};\n")
    shutil.copyfile(ROOT / "docs/site/search.js", arguments.out / "search.js")
    for image in site.images:
        (arguments.out / image).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / image, arguments.out / image)
    if arguments.api:
        shutil.copytree(arguments.api, arguments.out / "api")
        if not (arguments.out / API).exists():
            site.broken.append(f"--api {arguments.api}: found no {API}; run cargo doc first")
    for line in site.broken:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(site.pages) + 1} pages in {arguments.out}, {len(site.broken)} errors")
    return 1 if site.broken else 0


if __name__ == "__main__":
    sys.exit(main())
