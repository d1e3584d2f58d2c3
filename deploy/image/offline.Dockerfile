# An image with a warm cache for a GPU that the builder does not have: an ordinary machine makes it, and no step of it sees a GPU.
# When CI has no GPU of the trainer's kind. Experimental: docs/offline-compile.md says what is proven, and what the first start does.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS base
# Triton and torch start a compiler, on GPUs too. Debian drops old versions, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY constraints.txt ./
# A CUDA build, whose CUDA and Triton are those of the profile; what torch chooses by itself is not pinned.
ARG TORCH=2.11.0
RUN sed -i -E '/^(torch|triton|setuptools)==/d' constraints.txt \
    && pip install --no-cache-dir -c constraints.txt "torch==$TORCH"
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[s3,sign]"
RUN groupadd --gid 10001 app \
    && useradd --uid 10001 --gid app --no-log-init --create-home app \
    && install -d -o app -g app -m 0700 /var/cache/compilecache
ARG PLAN=deploy/kubernetes/base/plan.yaml
COPY ${PLAN} ./plan.yaml
ENV COMPILECACHE_ROOT=/var/cache/compilecache
USER 10001:10001

# Compiles what the store lacks, in a process without a GPU. Credentials and key are mounts, in no layer.
FROM base AS warm
# A profile that comes with the package, or one of your own: /context/my/h100.json is my/h100.json of what the build is given.
ARG GPU_PROFILE=h200
ARG STORE=none
USER 0:0
RUN install -d -o app -g app /opt/compilecache
USER 10001:10001
RUN --mount=type=secret,id=aws,target=/run/secrets/aws,uid=10001,mode=0400 \
    --mount=type=secret,id=sign_key,target=/run/secrets/sign_key,uid=10001,mode=0400 \
    --mount=type=bind,target=/context \
    if [ -f /run/secrets/aws ]; then export AWS_SHARED_CREDENTIALS_FILE=/run/secrets/aws; fi \
    && if [ -f /run/secrets/sign_key ]; then export COMPILECACHE_SIGN_KEY=/run/secrets/sign_key; fi \
    && warmup run plan.yaml --gpu-profile "$GPU_PROFILE" --store "$STORE" --target-timeout 1800 --timeout 7200 --bake /opt/compilecache

FROM base AS final
# Root's, and read-only: any user may run the image, none can change the cache.
COPY --from=warm --chown=0:0 /opt/compilecache /opt/compilecache/
ENV COMPILECACHE_BAKED=/opt/compilecache
CMD ["python"]
