"""Many prompts at once from Python, without a server: python examples/batch_generation.py"""

from thalweg.engine.engine import Engine
from thalweg.engine.params import Params, Sampling
from thalweg.engine.pools import CacheSettings
from thalweg.engine.text import Text
from thalweg.models.open import TINY, open_model

prompts = ["def read_lines(path):", "The river ", "import os\n", "class Node:"]
model = open_model(TINY)  # or the folder of a DeepSeek-V4, V3, R1 or Kimi K2 checkpoint
text = Text(TINY, model.config.bos_token_id)
engine = Engine(model, text, CacheSettings(context_length=1024, kv_tokens=4096, max_requests=len(prompts)))

written = dict.fromkeys(prompts, "")
for prompt in prompts:
    engine.add(prompt, text.encode(prompt), Params(Sampling(temperature=0.6, seed=1), max_tokens=48))
while engine.busy:
    for output in engine.step():  # one row of every request that decodes, or a chunk of the prompts
        written[output.request_id] += output.text
for prompt in prompts:
    print(f"--- {prompt!r}\n{prompt}{written[prompt]}")
