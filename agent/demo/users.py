"""The demo's users: an open loop of streamed completions at the router, seeded; they do not wait for each other."""

from __future__ import annotations

import http.client
import json
import random
import threading

TOKENS = 24
PROMPT_WORDS = 480  # of which all but the last 32 are one of a few that are shared
SHARED = 6
ANSWER_WITHIN_S = 60.0
MOST_AT_ONCE = 200


class Users:
    """So many requests a second until stopped. `answered` and `failed` are counts."""

    def __init__(self, port: int, rate_per_s: float, seed: int) -> None:
        self.rate_per_s = rate_per_s
        self.answered = self.failed = 0
        self._port, self._random = port, random.Random(seed)  # noqa: S311  (a story, and no secret)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._asking = 0
        self._shared = [self._words(PROMPT_WORDS - 32) for _ in range(SHARED)]
        self._thread = threading.Thread(target=self._arrive, name="users", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No one comes any more."""
        self._stopping.set()
        self._thread.join(5.0)

    def _words(self, count: int) -> str:
        return " ".join(f"w{self._random.randrange(30000)}" for _ in range(count))

    def _arrive(self) -> None:
        while not self._stopping.wait(self._random.expovariate(self.rate_per_s)):
            prompt = f"{self._random.choice(self._shared)} {self._words(32)}"
            if self._asking < MOST_AT_ONCE:
                threading.Thread(target=self._ask, args=(prompt,), daemon=True).start()

    def _ask(self, prompt: str) -> None:
        with self._lock:
            self._asking += 1
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_WITHIN_S)
        try:
            asked = {"model": "llama-70b", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            good = connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        except (OSError, http.client.HTTPException):
            good = False
        finally:
            connection.close()
        with self._lock:
            self._asking -= 1
            self.answered += good
            self.failed += not good
