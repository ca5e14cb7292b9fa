-- Some sandboxes by id.
-- KEYS  1 prefix
-- ARGV  1… sandboxes (a page of them)
-- Returns rows as in sandbox.lua of those that are known.
--@use time route view
local ms, rows = now_ms(), {}
for _, sid in ipairs(A) do
  local row = view(sid, ms)
  if row then rows[#rows + 1] = row end
end
return rows
