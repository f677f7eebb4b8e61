"""A headless Chromium for tests of pages. Without it, tests are skipped, or fail if FEDPIPE_REQUIRE_BROWSER is set."""

import fcntl
import json
import os
import select
import shutil
import subprocess

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
assert BROWSER or "FEDPIPE_REQUIRE_BROWSER" not in os.environ, "install Chromium, or unset FEDPIPE_REQUIRE_BROWSER"

#: Seconds within which the browser answers, so that no test waits forever.
PATIENCE = 300


class Browser:
    """A headless Chromium, controlled by its debugging pipe."""

    def __init__(self, profile):
        command_end, write = os.pipe()
        read, answer_end = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        flags += ["--disable-dev-shm-usage"]  # /dev/shm of a container may be too small for a page
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_end, answer_end)]

        def set_descriptors():  # the browser reads from 3 and writes to 4
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)

        command = [BROWSER, *flags, "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=set_descriptors, close_fds=False, stderr=subprocess.DEVNULL)
        for end in (command_end, answer_end, *ends):
            os.close(end)
        # select would not see the bytes in a buffer
        self.reading, self.writing = os.fdopen(read, "rb", buffering=0), os.fdopen(write, "wb")
        self.rest, self.events, self.number, self.session = b"", [], 0, None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        """Call a method and return its result. Add earlier events to ``events``."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.writing.write(json.dumps(message).encode() + b"\0")
        self.writing.flush()
        while True:
            message = self.next()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def next(self):
        while b"\0" not in self.rest:
            assert select.select([self.reading], [], [], PATIENCE)[0], f"the browser sent nothing for {PATIENCE} s"
            part = self.reading.read(1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        first, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(first)
        assert message.get("method") != "Inspector.targetCrashed", "the page has crashed"
        return message

    def open(self, path, width):
        """Load a page at a width, and return all events until it is loaded."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        self.events = []
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())
        return self.events

    def evaluate(self, expression):
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.reading.close()
        self.writing.close()


def list_problems(browser, path, width):
    """Return the problems that a browser reports, and its requests except for the page."""
    events = browser.open(path, width)
    problems = [event for event in events if event.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"}]
    problems += [event for event in events if event.get("method") == "Runtime.consoleAPICalled"]
    requests = [
        event["params"]["request"]["url"] for event in events if event.get("method") == "Network.requestWillBeSent"
    ]
    return problems, [url for url in requests if url != path.as_uri() and not url.startswith("data:")]
