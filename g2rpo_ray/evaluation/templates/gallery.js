// Sorts the cards by a score, hides the rows of other steps and the prompts without the words.
const form = document.querySelector("form");
const holder = document.getElementById("cards");
const cards = [...holder.children].map((card) => ({ card, ...JSON.parse(card.dataset.scores) }));

/** The number that a card is sorted by; null where there is none. */
function keyOf({ id, scores, base }, { reward, row, steps, what }) {
  if (reward.value === "id") return id;
  const score = scores[steps.value]?.[row.value]?.[reward.value] ?? null;
  if (what.value === "score" || score === null) return score;
  const baseScore = base[steps.value]?.[reward.value] ?? null;
  return baseScore === null ? null : score - baseScore;
}

function update() {
  const fields = form.elements;
  for (const row of holder.querySelectorAll(".row")) {
    row.hidden = row.dataset.steps !== fields.steps.value;
  }
  const direction = fields.reward.value === "id" ? 1 : Number(fields.order.value);
  const keyed = cards.map((item) => ({ ...item, key: keyOf(item, fields) }));
  // Prompts without a score come last, whichever way the others are sorted.
  keyed.sort(
    (a, b) =>
      (a.key === null) - (b.key === null) || direction * (a.key - b.key) || a.id - b.id,
  );
  const words = fields.text.value.toLowerCase();
  let shown = 0;
  for (const { card } of keyed) {
    card.hidden = !card.textContent.toLowerCase().includes(words);
    shown += !card.hidden;
    holder.append(card);
  }
  fields.count.value = `${shown} of ${cards.length} prompts`;
}

form.addEventListener("input", update);
form.addEventListener("submit", (event) => event.preventDefault());
update();
