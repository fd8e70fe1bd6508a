# An image with sana-pipe and its libraries, without weights: `make image`, then
#   docker run --gpus all -v "$PWD:/data" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" sana-pipe init --data pictures
# torch's wheel brings CUDA's libraries; the base gives the driver's mounts, and gcc is for Triton's launchers.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/sana-pipe
COPY dist/*.whl constraints.txt /tmp/
RUN /opt/sana-pipe/bin/pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /tmp/sana_pipe-*.whl)[s3]"
ENV PATH=/opt/sana-pipe/bin:$PATH
WORKDIR /data
ENTRYPOINT ["sana-pipe"]
