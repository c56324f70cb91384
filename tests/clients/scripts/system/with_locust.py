"""locust without its page: all chat requests of its users succeed, streamed and not."""

import json
import tempfile
from pathlib import Path

from served import beside_python, ran, served

REQUESTS = 40
USERS = """
from locust import FastHttpUser, events, task

MODEL, REQUESTS = {model!r}, {requests}
MESSAGES = [{{"role": "user", "content": "add 2 3 ="}}]
ASKED = {{"model": MODEL, "temperature": 0, "messages": MESSAGES}}


class Asking(FastHttpUser):
    @task
    def whole(self):
        with self.client.post("/v1/chat/completions", json=ASKED, catch_response=True) as said:
            if said.json()["choices"][0]["message"]["content"].strip() != "5":
                said.failure(said.text)

    @task
    def streamed(self):
        asked = {{**ASKED, "stream": True}}
        with self.client.post("/v1/chat/completions", json=asked, catch_response=True) as said:
            if not said.text.endswith("data: [DONE]\\n\\n"):
                said.failure(said.text)


@events.init.add_listener
def end_with_the_last(environment, **_):
    @environment.events.request.add_listener
    def count(**_):
        if environment.stats.total.num_requests >= REQUESTS:
            environment.runner.quit()
"""

at = served()
with tempfile.TemporaryDirectory() as directory:
    users = Path(directory) / "users.py"
    users.write_text(USERS.format(model=at.model, requests=REQUESTS))
    how = ("--headless", "--users", "4", "--spawn-rate", "4", "--json", "--host", at.url)
    endpoints = json.loads(ran(beside_python("locust"), "--locustfile", str(users), *how))
assert sum(endpoint["num_requests"] for endpoint in endpoints) >= REQUESTS, endpoints
assert not any(endpoint["num_failures"] for endpoint in endpoints), endpoints
