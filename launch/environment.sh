# Sourced by the other scripts of this folder. Installs oneloop and the extra $1, unless they are up to date, into the
# active environment or .venv. Sets $python.
extra=$1
unset PYTHONDONTWRITEBYTECODE  # containers set it; each process would then compile torch's source for ten seconds
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    base=${PYTHON:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      echo "oneloop needs Python 3.10 or newer; $base is $("$base" --version 2>&1). Set PYTHON to a newer one." >&2
      exit 2
    }
    echo "making .venv"
    "$base" -m venv .venv
  fi
  export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
fi
prefix=${VIRTUAL_ENV:-$CONDA_PREFIX}
python=$prefix/bin/python
stamp=$prefix/.oneloop-$extra
expected="$PWD $(cat pyproject.toml launch/environment.sh | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$expected" ]; then
  echo "installing oneloop[$extra] into $prefix (several GB the first time)"
  if command -v uv >/dev/null || "$python" -m pip install --quiet uv 2>/dev/null; then
    install=("$(command -v uv || echo "$prefix/bin/uv")" pip install --quiet --compile-bytecode --python "$python")
  else
    install=("$python" -m pip install --quiet)
  fi
  "${install[@]}" -e ".[$extra]"
  # The schema of launch/skypilot.yaml. SkyPilot excludes the newest transformers: install it into a separate folder.
  if [ "$extra" = test ]; then
    "${install[@]}" --target "$prefix/skypilot" "skypilot>=0.11" || echo "launch/skypilot.yaml is not tested"
  fi
  echo "$expected" > "$stamp"
fi
