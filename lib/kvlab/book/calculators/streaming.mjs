// The slots of kvlab.cache.StreamingCache in the page: sinks that stay, then a ring.

/** The slot of a token: a sink has its own, the others go round. */
export const slotOf = (position, sinks, window) => (position < sinks ? position : sinks + ((position - sinks) % window));

/** Which token each slot holds after so many; null where none was written. */
export function heldSlots(seen, sinks, window) {
  return [...Array(sinks + window).keys()].map((slot) => {
    if (slot >= seen) return null;
    return slot < sinks ? slot : slot + Math.floor((seen - 1 - slot) / window) * window;
  });
}

/** Where the window begins after so many tokens; before it stand the sinks, and what is forgotten. */
export const windowStart = (seen, sinks, window) => Math.max(seen - window, Math.min(sinks, seen));
