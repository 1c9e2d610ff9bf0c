#!/usr/bin/env node
// Vercel's AI SDK through the Responses API: with_ai_sdk.mjs [--continue] QUESTION; prints the answer.
import { readFileSync, writeFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const kept = `${process.env.HOME}/conversation.json`;
const messages = process.argv.includes("--continue") ? JSON.parse(readFileSync(kept, "utf8")) : [];
messages.push({ role: "user", content: process.argv.at(-1) });
const answer = streamText({
  model: createOpenAI({ baseURL: process.env.OPENAI_BASE_URL })(process.env.OPENAI_MODEL),
  messages,
  stopWhen: stepCountIs(3),
  tools: {
    read_file: tool({
      description: "Reads a file.",
      inputSchema: z.object({ path: z.string() }),
      execute: ({ path }) => readFileSync(path, "utf8"),
    }),
  },
});
console.log(await answer.text);
writeFileSync(kept, JSON.stringify([...messages, ...(await answer.response).messages]));
