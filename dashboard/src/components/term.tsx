/** A word with an explanation, which appears while the pointer or the keyboard focus is on the word. */

import { signal } from "@preact/signals";
import { useEffect, useId } from "preact/hooks";
import { EXPLANATIONS } from "../format/glossary";

interface Tip {
  text: string;
  word: Element;
  left: number;
  top: number;
}

const WIDTH_PX = 280;
const MARGIN_PX = 8;
const tip = signal<Tip | null>(null);

function show(word: Element, text: string): void {
  const box = word.getBoundingClientRect();
  const widest = document.documentElement.clientWidth - WIDTH_PX - MARGIN_PX;
  tip.value = { text, word, left: Math.max(MARGIN_PX, Math.min(box.left, widest)), top: box.bottom + 6 };
}

/** Moves the open explanation with its word. */
const follow = () => tip.value && show(tip.value.word, tip.value.text);

const hide = () => {
  tip.value = null;
};

/** The event handlers of an element that shows `text` while it has the pointer or the focus. */
export function explains(text: string) {
  return {
    onPointerEnter: (event: { currentTarget: Element }) => show(event.currentTarget, text),
    onPointerLeave: hide,
    onFocus: (event: { currentTarget: Element }) => show(event.currentTarget, text),
    onBlur: hide,
    onKeyDown: (event: KeyboardEvent) => event.key === "Escape" && hide(),
  };
}

/** Explains `word` with its text in the glossary. A word without one is plain text. */
export function Term({ word }: { word: string }) {
  const id = useId();
  const text = EXPLANATIONS[word];
  if (!text) return <>{word}</>;
  return (
    <>
      <span class="term" tabIndex={0} aria-describedby={id} {...explains(text)}>
        {word}
      </span>
      <span id={id} hidden>
        {text}
      </span>
    </>
  );
}

/** The explanation that is open. It has one place in the page, so that no narrow box cuts it off. */
export function OpenTip() {
  const open = tip.value;
  useEffect(() => {
    addEventListener("scroll", follow, { passive: true, capture: true });
    addEventListener("hashchange", hide); // The next view does not have the word.
    return () => {
      removeEventListener("scroll", follow, { capture: true });
      removeEventListener("hashchange", hide);
    };
  }, []);
  if (!open) return null;
  return (
    <div class="tip" aria-hidden="true" style={{ left: `${open.left}px`, top: `${open.top}px` }}>
      {open.text}
    </div>
  );
}
