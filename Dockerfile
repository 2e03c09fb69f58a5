# docker build -t llmq .
# docker run --rm --gpus all -v "$PWD:/data" llmq finetune talks.jsonl --model model
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /llmq
COPY pyproject.toml README.md LICENSE ./
COPY llmq llmq
RUN pip install --no-cache-dir ".[hub,parquet,gguf]"
# Downloaded models and compiled kernels stay there if a volume is mounted.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
WORKDIR /data
ENTRYPOINT ["llmq"]
