"""The openai package against `thalweg serve`: python examples/openai_client.py [http://127.0.0.1:8000/v1]"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "def read_lines(path):"}],
    max_completion_tokens=64,
    temperature=0.6,
    seed=3,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 20},  # what OpenAI's API has no name for
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n--- {chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} written")
