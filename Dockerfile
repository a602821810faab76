# Tercet in a container. Cards: docker run --gpus all --shm-size 8g -v "$PWD:/work" tercet train recipe.yaml
#   docker build -t tercet .
#   docker run -v "$PWD:/work" tercet plan deepseek-llm-7b --gpus 3x4090
FROM python:3.12-slim

# Compiled kernels (strategy.compile) and DeepSpeed's file access are built on the machine that runs them.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libaio-dev && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[train]"

# Prepared data and fetched models outlive the container when these lie on a volume.
ENV XDG_CACHE_HOME=/work/.cache XDG_CONFIG_HOME=/work/.config HF_HOME=/work/.cache/huggingface
WORKDIR /work
ENTRYPOINT ["tercet"]
