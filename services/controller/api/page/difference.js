// Difference of two token sequences, from their longest common subsequence.

const MAX_CELLS = 16e6;

/** Pieces [kind, text] in order; kind is "same", "removed" (only in `before`) or "added" (only in `after`). */
export function difference(before, after) {
  let begin = 0;
  while (begin < before.length && begin < after.length && before[begin] === after[begin]) begin += 1;
  let end = 0;
  while (end < before.length - begin && end < after.length - begin && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const middle = between(before.slice(begin, before.length - end), after.slice(begin, after.length - end));
  return merge([["same", before.slice(0, begin).join("")], ...middle, ["same", end ? before.slice(-end).join("") : ""]]);
}

function between(before, after) {
  if (before.length * after.length > MAX_CELLS) return [["removed", before.join("")], ["added", after.join("")]];
  const width = after.length + 1;
  const common = new Uint16Array((before.length + 1) * width); // length of the common subsequence of both tails
  for (let row = before.length - 1; row >= 0; row -= 1) {
    for (let column = after.length - 1; column >= 0; column -= 1) {
      common[row * width + column] = before[row] === after[column]
        ? common[(row + 1) * width + column + 1] + 1
        : Math.max(common[(row + 1) * width + column], common[row * width + column + 1]);
    }
  }
  const pieces = [];
  let [row, column] = [0, 0];
  while (row < before.length || column < after.length) {
    if (row < before.length && column < after.length && before[row] === after[column]) {
      pieces.push(["same", before[row]]);
      row += 1;
      column += 1;
    } else if (column === after.length || (row < before.length && common[(row + 1) * width + column] >= common[row * width + column + 1])) {
      pieces.push(["removed", before[row]]);
      row += 1;
    } else {
      pieces.push(["added", after[column]]);
      column += 1;
    }
  }
  return pieces;
}

function merge(pieces) {
  const merged = [];
  for (const [kind, text] of pieces) {
    if (!text) continue;
    if (merged.at(-1)?.[0] === kind) merged.at(-1)[1] += text;
    else merged.push([kind, text]);
  }
  return merged;
}
