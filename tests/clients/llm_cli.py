"""llm, the command line, with a model in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from steps import SUM_ANSWER, Target, run

MODEL = """
- model_id: turnout
  model_name: {model}
  api_base: "{base}"
  api_key_name: turnout
  supports_tools: true
  supports_schema: true
"""


def llm(target: Target, *arguments: str) -> str:
    settings = target.directory / "llm"
    settings.mkdir(exist_ok=True)
    (settings / "extra-openai-models.yaml").write_text(MODEL.format(model=target.model, base=target.base))
    (settings / "keys.json").write_text(json.dumps({"turnout": target.key}))
    program = str(Path(sys.executable).parent / "llm")
    done = subprocess.run(
        [program, *arguments],
        env=os.environ | {"LLM_USER_PATH": str(settings)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout.strip()


def models(target: Target) -> None:
    """llm models lists the model of the yaml file"""
    assert "turnout" in llm(target, "models")


def prompt(target: Target) -> None:
    """a prompt, streamed and not"""
    for option in ((), ("--no-stream",)):
        answer = llm(target, "-m", "turnout", *option, "-o", "temperature", "0", "What is 17 + 25?")
        assert answer.endswith(SUM_ANSWER), answer


def conversation(target: Target) -> None:
    """a conversation goes on with -c, and the log holds token counts"""
    llm(target, "-m", "turnout", "-o", "temperature", "0", "My name is Clara.")
    assert llm(target, "-c", "-m", "turnout", "-o", "temperature", "0", "-o", "max_tokens", "80", "What is my name?")
    (entry,) = json.loads(llm(target, "logs", "-n", "1", "--json"))
    assert entry["input_tokens"] and entry["output_tokens"], entry


def schema(target: Target) -> str:
    """--schema: the answer is JSON of it"""
    question = "Give me a JSON object with name and age: Tom is 30 years old."
    answer = llm(target, "-m", "turnout", "-o", "temperature", "0", "--schema", "name, age int", question)
    assert set(json.loads(answer)) == {"name", "age"}, answer
    return answer


def tools(target: Target) -> str:
    """--functions: the model calls a Python function and answers with its result"""
    code = 'def get_weather(city: str) -> str:\n    "Get the weather in a city"\n    return "sunny"\n'
    question = "What is the weather in Paris?"
    return llm(target, "-m", "turnout", "-o", "temperature", "0", "--functions", code, "--td", question)


if __name__ == "__main__":
    run("llm", [models, prompt, conversation, schema, tools])
