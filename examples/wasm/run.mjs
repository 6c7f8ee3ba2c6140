// run.mjs: runs a WASI program under Node 18 or later.
//
//     node --no-warnings examples/wasm/run.mjs PROGRAM.wasm ARGUMENTS
//
// The program sees the whole file system under "/": give absolute paths.
import { readFile } from "node:fs/promises";
import process from "node:process";
import { WASI } from "node:wasi";

const [program, ...rest] = process.argv.slice(2);
if (program === undefined) {
  console.error("usage: node run.mjs PROGRAM.wasm ARGUMENTS");
  process.exit(2);
}
const wasi = new WASI({
  version: "preview1",
  args: [program, ...rest],
  env: process.env,
  preopens: { "/": "/" },
  returnOnExit: true,
});
const module = await WebAssembly.compile(await readFile(program));
const instance = await WebAssembly.instantiate(module, {
  wasi_snapshot_preview1: wasi.wasiImport,
});
process.exitCode = wasi.start(instance);
