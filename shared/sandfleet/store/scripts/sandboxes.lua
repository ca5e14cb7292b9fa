-- A page of all sandboxes, sorted by id.
-- KEYS  1 prefix
-- ARGV  1 lower bound in ZRANGEBYLEX form  2 page size
-- Returns {last id of a full page or '', {rows as in sandbox.lua}}
--@use time route view
local ms, rows = now_ms(), {}
local ids = call('ZRANGEBYLEX', P .. 'sandboxes', A[1], '+', 'LIMIT', 0, A[2])
for _, sid in ipairs(ids) do
  local row = view(sid, ms)
  if row then
    rows[#rows + 1] = row
  else
    call('ZREM', P .. 'sandboxes', sid)
  end
end
return { #ids == tonumber(A[2]) and ids[#ids] or '', rows }
