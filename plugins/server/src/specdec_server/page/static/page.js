"use strict";

// The page at /: a conversation whose tokens show where they came from. Talks to the server's own API and to nothing else.

const at = (id) => document.getElementById(id);
const conversation = [];
let running = null;
let lastMessages = null;
let speculates = true;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// --- the server ------------------------------------------------------------------------------------

const GONE = "The server does not answer. Is it still running?";
const NO_KEY = "The API key has a character that no key has: is the keyboard set to another language?";
const CUT = "The connection to the server broke before the answer was complete.";

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

function failure(message, status) {
  return Object.assign(new Error(message), { status });
}

async function ask(path, options) {
  if (/[^ -~]/.test(at("key").value)) throw failure(NO_KEY, 401); // headers cannot hold it
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
  if (response.ok) return response;
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // something in between answered, and not in the API's form
  }
  const wait = response.headers.get("Retry-After");
  throw failure(wait ? `${message} (try again in ${wait} s)` : message, response.status);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(CUT);
    }
    if (part.done) throw new Error(CUT);
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: [DONE]")) return;
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function answer(messages, plain, signal, onTokens) {
  const before = await metrics();
  const began = performance.now();
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body(messages, plain)), signal });
  const result = { text: "", began, first: null, last: null, tokens: 0, firstTokens: 0, origins: [], stats: null, before };
  for await (const chunk of events(response)) {
    for (const choice of chunk.choices) {
      result.text += choice.delta.content ?? "";
      if (choice.token_origins && choice.token_origins.length) addTokens(result, choice, onTokens);
    }
    if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
    if (chunk.spec_stats) result.stats = chunk.spec_stats;
  }
  result.stages = stages(before, await metrics());
  return result;
}

function addTokens(result, choice, onTokens) {
  result.last = performance.now();
  result.tokens += choice.token_origins.length;
  if (result.first === null) {
    result.first = result.last;
    result.firstTokens = result.tokens;
  }
  result.origins.push(...choice.token_origins);
  onTokens?.(choice.token_bytes, choice.token_origins, result);
}

async function metrics() {
  try {
    const text = await (await ask("metrics")).text();
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
    return {}; // the numbers are left out; what matters fails with a message of its own
  }
}

const STAGES = ["propose", "target", "verify", "rest"];

function stages(before, after) {
  const steps = after.steps - before.steps;
  if (!(steps > 0)) return null;
  return STAGES.map((name) => [name, (1000 * ((after[name] ?? 0) - (before[name] ?? 0))) / steps]);
}

// --- numbers ---------------------------------------------------------------------------------------

const fixed = (value, digits, unit) => (value === null || value === undefined ? "–" : `${value.toFixed(digits)}${unit}`);

// Tokens a second after the first ones arrived: what waits in the queue and the prompt's own work stay out.
function rate(result) {
  const seconds = (result.last - result.first) / 1000;
  const tokens = result.tokens - result.firstTokens;
  return tokens > 0 && seconds > 0 ? tokens / seconds : null;
}

function share(result) {
  const accepted = result.origins.filter((origin) => origin >= 0).length;
  return result.origins.length ? `${Math.round((100 * accepted) / result.origins.length)} %` : "–";
}

function facts(result) {
  return `${result.tokens} tokens · ${fixed(rate(result), 1, "")} tokens/s · ${share(result)} from drafts`;
}

// Each draft ends with a token of the model's own, until the server's own count is there.
const numDrafts = (result) => result.stats?.num_drafts ?? result.origins.filter((origin) => origin === -2 || origin === -3).length;

function acceptedPerPosition(result) {
  if (result.stats) return result.stats.num_accepted_tokens_per_pos;
  const counts = [];
  for (const origin of result.origins) if (origin >= 0) counts[origin] = (counts[origin] ?? 0) + 1;
  return Array.from(counts, (count) => count ?? 0);
}

// --- showing ---------------------------------------------------------------------------------------

const MOST_COLOURS = 6;

function kindOf(origin) {
  if (origin >= 0) return [`o${Math.min(origin, MOST_COLOURS - 1)}`, `draft token accepted at position ${origin}`];
  if (origin === -2) return ["recovered", "recovered: the model left the draft here"];
  if (origin === -4) return ["own", "forced: the grammar leaves no other token"];
  if (origin === -3) return ["bonus", "bonus: the model’s own after a whole draft"];
  return ["own", "the model’s own, without a draft"];
}

function showTokens(element) {
  const decoder = new TextDecoder();
  return (bytes, origins) => {
    origins.forEach((origin, index) => {
      const piece = decoder.decode(Uint8Array.from(bytes[index]), { stream: true });
      if (!piece) return;
      const [name, title] = kindOf(origin);
      const token = make("span", `token ${name}`, piece);
      token.title = title;
      element.append(token);
    });
  };
}

// On a wide screen the messages scroll, on a narrow one the whole page does.
const scroller = () => (getComputedStyle(at("messages")).overflowY === "auto" ? at("messages") : document.scrollingElement);

function isAtEnd() {
  const box = scroller();
  const below = box === at("messages") ? 0 : document.querySelector("aside").offsetHeight;
  return box.scrollHeight - below - box.scrollTop - box.clientHeight < 120;
}

function toEnd() {
  if (scroller() === at("messages")) at("messages").scrollTop = at("messages").scrollHeight;
  else at("ask").scrollIntoView({ block: "end" });
}

function addMessage(role, text) {
  at("welcome").hidden = true;
  const message = make("article", `message ${role}`);
  message.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const content = make("div", "", text);
  content.dir = "auto"; // Arabic and Hebrew begin at the right
  message.append(content);
  at("messages").append(message);
  toEnd();
  return message;
}

function list(id, rows) {
  at(id).replaceChildren(...rows.flatMap(([label, value]) => [make("dt", "", label), make("dd", "", value)]));
}

function bar(label, part, text, fillName) {
  const row = make("div", "bar");
  const track = make("span", "track");
  const fill = make("span", `fill ${fillName}`);
  fill.style.width = `${100 * part}%`;
  track.append(fill);
  row.append(make("span", "", label), track, make("span", "", text));
  return row;
}

function showAnswer(result) {
  list("numbers", [
    ["tokens", String(result.tokens)],
    ["tokens/s", fixed(rate(result), 1, "")],
    ["from drafts", share(result)],
    ["acceptance length", fixed(result.stats?.mean_acceptance_length, 2, "")],
    ["first token after", fixed(result.first === null ? null : (result.first - result.began) / 1000, 2, " s")],
  ]);
  showBars(acceptedPerPosition(result), numDrafts(result));
}

function showBars(counts, drafts) {
  const shares = drafts ? counts.map((count) => Math.min(1, count / drafts)) : [];
  const percent = (part) => `${Math.round(100 * part)} %`;
  const rows = shares.map((part, position) => bar(String(position), part, percent(part), kindOf(position)[0]));
  at("bars").replaceChildren(...(rows.length ? rows : [make("p", "quiet", "no drafts yet")]));
  const spoken = shares.map((part, position) => `position ${position}: ${percent(part)}`).join(", ");
  at("bars").setAttribute("aria-label", spoken || "no drafts yet");
}

function showStages(found) {
  if (!found) return;
  list("stages", found.map(([name, value]) => [name, fixed(value, 2, " ms")]));
  at("stack").replaceChildren(...found.map(([name, value]) => {
    const part = make("span", name);
    part.style.flexGrow = String(value);
    return part;
  }));
}

function showComparison(plain, again) {
  const [slow, fast] = [rate(plain), rate(again)];
  const measured = Boolean(slow && fast);
  at("speedup").hidden = at("rates").hidden = !measured;
  if (!measured) {
    at("comparison").textContent = "The answer is too short to measure.";
    return;
  }
  const most = Math.max(slow, fast);
  at("speedup").textContent = `${(fast / slow).toFixed(2)}×`;
  at("rates").replaceChildren(
    bar("plain", slow / most, `${slow.toFixed(1)}/s`, "without"),
    bar("with", fast / most, `${fast.toFixed(1)}/s`, "with"),
  );
  const same = plain.text === again.text ? "The text is the same." : "The texts differ: no fixed seed, or half precision.";
  at("comparison").textContent =
    `${fast.toFixed(1)} tokens/s with speculation, ${slow.toFixed(1)} without: ${(fast / slow).toFixed(2)} times. ${same}`;
}

function showError(error) {
  at("error").textContent = error.message;
  if (error.status === 401) openSettings(true);
}

// --- actions ---------------------------------------------------------------------------------------

function busy(controller, text) {
  running = controller;
  at("send").disabled = controller !== null;
  at("stop").disabled = controller === null;
  at("compare").disabled = controller !== null || lastMessages === null || !speculates;
  at("status").textContent = text;
  if (controller) at("error").textContent = "";
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  const messages = [...conversation, { role: "user", content: text }];
  const asked = addMessage("user", text);
  const message = addMessage("assistant", "");
  message.classList.add("running");
  const controller = new AbortController();
  busy(controller, "answering…");
  const live = { result: null, draw: null };
  try {
    const result = await answer(messages, false, controller.signal, watch(message, live));
    live.draw();
    finish(messages, message, result.text, facts(result));
    lastMessages = messages;
    showAnswer(result);
    showStages(result.stages);
    at("spoken").textContent = result.text;
    busy(null, "");
  } catch (error) {
    if (controller !== running) return; // the conversation was cleared meanwhile
    const stopped = error.name === "AbortError";
    live.draw();
    if (live.result) finish(messages, message, live.result.text, stopped ? "stopped" : "incomplete");
    else takeBack(text, asked, message);
    busy(null, stopped ? "stopped" : "");
    if (!stopped) showError(error);
  }
  if (document.activeElement === document.body) at("prompt").focus();
}

// What happens with each part of an answer while it comes: it is drawn once a frame, so that drawing does not slow reading.
function watch(message, live) {
  const show = showTokens(message.firstChild);
  let looked = performance.now();
  let waiting = [];
  let frame = 0;
  live.draw = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    if (!waiting.length) return;
    const stays = isAtEnd();
    for (const [bytes, origins] of waiting) show(bytes, origins);
    waiting = [];
    if (stays) toEnd();
    showAnswer(live.result);
  };
  return (bytes, origins, result) => {
    waiting.push([bytes, origins]);
    live.result = result;
    frame ||= requestAnimationFrame(live.draw);
    if (result.last - looked < 1000) return;
    looked = result.last;
    metrics().then((now) => showStages(stages(result.before, now)));
  };
}

function finish(messages, message, text, note) {
  conversation.splice(0, conversation.length, ...messages, { role: "assistant", content: text });
  message.classList.remove("running");
  message.append(make("p", "facts", note));
  toEnd();
}

// Nothing came: the question is the reader's again.
function takeBack(text, asked, message) {
  asked.remove();
  message.remove();
  at("welcome").hidden = at("messages").querySelector(".message") !== null;
  if (!at("prompt").value) at("prompt").value = text;
}

async function compare() {
  if (!lastMessages || running) return;
  const controller = new AbortController();
  busy(controller, "");
  at("stop").focus();
  const progress = (label) => (_, __, result) => { at("status").textContent = `measuring ${label}: ${result.tokens} tokens…`; };
  try {
    const plain = await answer(lastMessages, true, controller.signal, progress("without speculation"));
    const again = await answer(lastMessages, false, controller.signal, progress("with speculation"));
    showComparison(plain, again);
    busy(null, "");
  } catch (error) {
    if (controller !== running) return;
    const stopped = error.name === "AbortError";
    busy(null, stopped ? "stopped" : "");
    if (!stopped) showError(error);
  }
  at("compare").focus();
}

function clear() {
  running?.abort();
  conversation.length = 0;
  lastMessages = null;
  at("messages").replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  at("error").textContent = "";
  busy(null, "");
  at("prompt").focus();
}

async function about() {
  try {
    const model = (await (await ask("v1/models")).json()).data[0];
    speculates = Boolean(model.speculation);
    const how = speculates ? `${model.speculation.method}, ${model.speculation.num_speculative_tokens} draft tokens` : "no speculation";
    at("model").textContent = `${model.id} · ${how} · verifier ${model.verifier}${model.lossless ? "" : " (lossy)"}`;
    at("error").textContent = "";
    if (!speculates) at("comparison").textContent = "This server runs without speculation: there is nothing to compare.";
  } catch (error) {
    at("model").textContent = "";
    showError(error);
  }
}

function legend() {
  const scale = make("span", "scale");
  const positions = [...Array(MOST_COLOURS).keys()];
  scale.append(...positions.map((p) => make("span", kindOf(p)[0], p < MOST_COLOURS - 1 ? String(p) : `${p}+`)));
  const entry = (sample, text, title) => {
    const item = make("li", "");
    item.title = title;
    item.append(sample, text);
    return item;
  };
  at("legend").replaceChildren(
    entry(scale, "accepted from the draft, by position", "the first token of a draft has position 0"),
    ...[[-2, "recovered"], [-3, "bonus"], [-1, "no draft"]].map(([origin, text]) =>
      entry(make("span", kindOf(origin)[0], "a"), text, kindOf(origin)[1])),
  );
}

function openSettings(open) {
  at("settings").hidden = !open;
  at("settings-button").setAttribute("aria-expanded", String(open));
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
at("settings-button").addEventListener("click", () => openSettings(at("settings").hidden));
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => { at("prompt").value = example.textContent; at("prompt").focus(); });
}
legend();
about();
if (!matchMedia("(pointer: coarse)").matches) at("prompt").focus(); // on a phone this would open the keyboard
