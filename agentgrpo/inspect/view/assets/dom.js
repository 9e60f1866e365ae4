// Elements from plain values. Text is always set as text: what a policy wrote is never markup.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) element.append(child);
  }
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (character) => ESCAPES[character]);

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(3);
}

const short = (value) => number(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

const signed = (value) => (value > 0 ? "+" : "") + number(value);
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const words = (name) => name.replace(/_/g, " ");
