"use strict";

// The page at /: a conversation whose tokens show where they came from. Talks to the server's own API and to nothing else.

const at = (id) => document.getElementById(id);
const conversation = [];
let running = null;
let lastRun = null;

// --- the server ------------------------------------------------------------------------------------

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function body(messages, plain) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const k = number("k");
  const speculation = plain || !at("speculate").checked ? false : k === undefined ? undefined : { num_speculative_tokens: k };
  return {
    messages, stream: true, stream_options: { include_usage: true }, temperature: number("temperature"),
    seed: number("seed"), max_tokens: number("max-tokens"), speculation,
    return_token_origins: true, return_token_bytes: true, return_spec_stats: true,
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(messages, plain, signal, onTokens) {
  const before = await metrics();
  const began = performance.now();
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body(messages, plain)), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const result = { text: "", first: null, last: null, tokens: 0, origins: [], stats: null };
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      if (choice.token_origins && choice.token_origins.length) {
        result.last = performance.now();
        result.first ??= result.last;
        result.tokens += choice.token_origins.length;
        result.origins.push(...choice.token_origins);
        onTokens?.(choice.token_bytes, choice.token_origins, result);
      }
      result.text += choice.delta.content ?? "";
    }
    if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
    if (chunk.spec_stats) result.stats = chunk.spec_stats;
  }
  result.seconds = (performance.now() - began) / 1000;
  result.wait = result.first === null ? null : (result.first - began) / 1000;
  result.stages = stages(before, await metrics());
  return result;
}

async function metrics() {
  try {
    const text = await (await fetch("metrics", { headers: headers() })).text();
    const sums = {};
    for (const line of text.split("\n")) {
      const found = /^specdec:(step_seconds_total|steps_total)\{(.*)\} (\S+)$/.exec(line);
      if (!found) continue;
      const stage = /stage="(\w+)"/.exec(found[2]);
      const name = stage ? stage[1] : "steps";
      sums[name] = (sums[name] ?? 0) + Number(found[3]);
    }
    return sums;
  } catch {
    return {};
  }
}

function stages(before, after) {
  const steps = (after.steps ?? 0) - (before.steps ?? 0);
  if (!steps) return null;
  const names = ["propose", "target", "verify", "rest"];
  return Object.fromEntries(names.map((name) => [name, (1000 * (after[name] - before[name])) / steps]));
}

// --- showing ---------------------------------------------------------------------------------------

function kindOf(origin) {
  if (origin >= 0) return [`o${Math.min(origin, 5)}`, `draft token accepted at position ${origin}`];
  if (origin === -2) return ["recovered", "recovered: the model left the draft here"];
  if (origin === -3) return ["bonus", "bonus: the model's own after a whole draft"];
  return ["plain", "the model's own, without a draft"];
}

function showTokens(element) {
  const decoder = new TextDecoder();
  return (bytes, origins) => {
    origins.forEach((origin, index) => {
      const piece = decoder.decode(Uint8Array.from(bytes[index]), { stream: true });
      if (!piece) return;
      const token = document.createElement("span");
      const [name, title] = kindOf(origin);
      token.className = `token ${name}`;
      token.title = title;
      token.textContent = piece;
      element.append(token);
    });
    const box = at("messages");
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 200) box.scrollTop = box.scrollHeight;
  };
}

function addMessage(role, text) {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  element.textContent = text;
  at("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

function list(id, rows) {
  at(id).replaceChildren(...rows.flatMap(([label, value]) => {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = label;
    text.textContent = value;
    return [term, text];
  }));
}

function rate(result) {
  const seconds = (result.last - result.first) / 1000;
  return result.tokens > 1 && seconds > 0 ? (result.tokens - 1) / seconds : null;
}

const fixed = (value, digits, unit) => (value === null || value === undefined ? "–" : `${value.toFixed(digits)}${unit}`);

function showLive(result) {
  const accepted = result.origins.filter((origin) => origin >= 0).length;
  list("numbers", [
    ["tokens", String(result.tokens)],
    ["tokens/s", fixed(rate(result), 1, "")],
    ["from drafts", result.tokens ? `${Math.round((100 * accepted) / result.tokens)} %` : "–"],
    ["acceptance length", fixed(result.stats?.mean_acceptance_length, 2, "")],
    ["first token", fixed(result.wait, 2, " s")],
  ]);
  const counts = [];
  for (const origin of result.origins) if (origin >= 0) counts[origin] = (counts[origin] ?? 0) + 1;
  const drafts = result.stats?.num_drafts ?? Math.max(0, ...result.origins.length ? [result.origins.filter((o) => o < -1).length] : []);
  showBars(result.stats?.num_accepted_tokens_per_pos ?? counts, drafts);
}

function showBars(counts, drafts) {
  const rows = [...counts].map((count, position) => {
    const share = drafts ? Math.min(1, (count ?? 0) / drafts) : 0;
    const row = document.createElement("div");
    row.className = "bar";
    const label = document.createElement("span");
    const meter = document.createElement("meter");
    const text = document.createElement("span");
    label.textContent = String(position);
    meter.value = share;
    meter.setAttribute("aria-label", `position ${position}`);
    text.textContent = `${Math.round(100 * share)} %`;
    row.append(label, meter, text);
    return row;
  });
  at("bars").replaceChildren(...rows);
  at("bars").setAttribute("aria-label", rows.length ? rows.map((row) => row.textContent).join(", ") : "no drafts yet");
}

function showStages(found) {
  const rows = found ? Object.entries(found).map(([name, value]) => [name, fixed(value, 2, " ms")]) : [];
  list("stages", rows);
}

// --- actions ---------------------------------------------------------------------------------------

function busy(controller) {
  running = controller;
  at("send").disabled = controller !== null;
  at("stop").disabled = controller === null;
  at("compare").disabled = controller !== null || lastRun === null;
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const element = addMessage("assistant", "");
  const show = showTokens(element);
  const controller = new AbortController();
  busy(controller);
  at("status").textContent = "answering…";
  const messages = [...conversation];
  try {
    const result = await answer(messages, false, controller.signal, (bytes, origins, now) => {
      show(bytes, origins);
      showLive(now);
    });
    conversation.push({ role: "assistant", content: result.text });
    lastRun = { messages, result };
    showLive(result);
    showStages(result.stages);
    at("status").textContent = "";
  } catch (error) {
    const text = element.textContent;
    conversation.push({ role: "assistant", content: text });
    at("status").textContent = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
  }
  busy(null);
  at("prompt").focus();
}

async function compare() {
  if (!lastRun || running) return;
  const controller = new AbortController();
  busy(controller);
  at("status").textContent = "measuring without speculation, then with…";
  try {
    const plain = await answer(lastRun.messages, true, controller.signal);
    const again = await answer(lastRun.messages, false, controller.signal);
    const [slow, fast] = [rate(plain), rate(again)];
    const same = plain.text === again.text ? "the text is the same" : "the texts differ: another seed, or half precision";
    at("comparison").textContent = slow && fast
      ? `${fast.toFixed(1)} tokens/s with speculation, ${slow.toFixed(1)} without: ${(fast / slow).toFixed(2)} times; ${same}.`
      : "The answer is too short to measure.";
    at("status").textContent = "";
  } catch (error) {
    at("status").textContent = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
  }
  busy(null);
}

function clear() {
  running?.abort();
  conversation.length = 0;
  lastRun = null;
  at("messages").replaceChildren();
  busy(null);
  at("prompt").focus();
}

async function about() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error.message);
    const model = content.data[0];
    const how = model.speculation ? `${model.speculation.method}, k = ${model.speculation.num_speculative_tokens}` : "no speculation";
    at("model").textContent = `${model.id} · ${how} · verifier ${model.verifier}${model.lossless ? "" : " (lossy)"}`;
  } catch (error) {
    at("model").textContent = error.message;
  }
}

function legend() {
  const entries = [0, 1, 2, 3, 4, 5].map((origin) => [origin, origin < 5 ? `draft ${origin}` : "draft 5+"]);
  entries.push([-2, "recovered"], [-3, "bonus"], [-1, "no draft"]);
  at("legend").replaceChildren(...entries.map(([origin, text]) => {
    const item = document.createElement("li");
    item.className = kindOf(origin)[0];
    item.textContent = text;
    return item;
  }));
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
at("stop").addEventListener("click", () => running?.abort());
at("compare").addEventListener("click", compare);
at("clear").addEventListener("click", clear);
at("key").addEventListener("change", about);
at("settings-button").addEventListener("click", () => {
  const panel = at("settings");
  panel.hidden = !panel.hidden;
  at("settings-button").setAttribute("aria-expanded", String(!panel.hidden));
});
legend();
about();
at("prompt").focus();
