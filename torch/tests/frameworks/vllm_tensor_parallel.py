"""vLLM: a small Llama with tensor parallelism. Its tokens must not depend on the backend.

    python vllm_tensor_parallel.py RANKS
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from outcome import backend_of, tell

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def backend_on_worker(worker):
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return backend_of(group.device_group), type(group.device_communicator).__name__


def main(ranks):
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            seed=1,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
        )
        backends = model.collective_rpc(backend_on_worker)
        prompts = [{"prompt_token_ids": [1 + index, 5, 9, 200 + index]} for index in range(4)]
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
        model.generate(prompts, sampling, use_tqdm=False)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            outputs = model.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    tell(0, by=backends[0][0], communicator=backends[0][1], tokens=tokens, seconds=sorted(seconds)[len(seconds) // 2])


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # By default, vLLM binds the threads of each rank to a NUMA node of its own.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # For collective_rpc with a function of this file.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    main(int(sys.argv[1]))
