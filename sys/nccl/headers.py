"""Fetches the headers out of NCCL's wheels, which are too large to fetch whole: 2 MB of 600.

    python3 sys/nccl/headers.py FOLDER VERSION...

The headers are in FOLDER/VERSION afterwards. A wheel is a zip file, and its server answers requests for ranges of
bytes.
"""

import io
import json
import pathlib
import sys
import urllib.request
import zipfile

INDEX = "https://pypi.org/simple/nvidia-nccl-cu13/"
WAIT_S = 60


def ask(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S)


class Remote(io.RawIOBase):
    """A file on a server, read by ranges."""

    def __init__(self, url):
        self.url, self.position = url, 0
        with ask(url, Range="bytes=0-0") as answer:
            if answer.status != 206:
                sys.exit(
                    f"{url}: found status {answer.status}, expected 206: the server gives no ranges"
                )
            self.size = int(answer.headers["Content-Range"].split("/")[1])

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        )
        return self.position

    def readinto(self, buffer):
        length = min(len(buffer), self.size - self.position)
        if length <= 0:
            return 0
        with ask(self.url, Range=f"bytes={self.position}-{self.position + length - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def fetch(files, version, folder):
    wheels = [
        f["url"] for f in files if f"-{version}-" in f["filename"] and "x86_64" in f["filename"]
    ]
    if not wheels:
        sys.exit(f"{INDEX}: found no wheel of {version} for x86_64")
    with zipfile.ZipFile(io.BufferedReader(Remote(wheels[0]), 1 << 20)) as wheel:
        headers = [
            name for name in wheel.namelist() if "/include/" in name and not name.endswith("/")
        ]
        for name in headers:
            path = folder / name.split("/include/")[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(name))
    print(f"NCCL {version}: {len(headers)} headers in {folder}")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    with ask(INDEX, Accept="application/vnd.pypi.simple.v1+json") as answer:
        files = json.load(answer)["files"]
    for version in sys.argv[2:]:
        fetch(files, version, folder / version)


if __name__ == "__main__":
    main()
