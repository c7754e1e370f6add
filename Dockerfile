# `diff-transformer serve` on the CPU. docs/serving.md says how it is built and run.
FROM python:3.12-slim

# The kernel is compiled when the image is made, and again where a processor has other instructions.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The build of torch without CUDA. It comes before the package, which changes more often.
ARG TORCH=2.13.0+cpu
WORKDIR /source
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}"

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[serve]"

# Whoever compiles the kernel has to be who loads it.
RUN useradd --create-home server
USER server
WORKDIR /home/server
RUN python -c "from diff_transformer.ops.cpu.cpu_build import load; load()"

EXPOSE 8000
ENTRYPOINT ["diff-transformer", "serve", "--host", "0.0.0.0"]
