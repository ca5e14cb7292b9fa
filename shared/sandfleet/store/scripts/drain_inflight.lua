-- A leaving node answers its unclaimed operations with NotStarted, in recorded order.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 limit
-- Returns {not started, 0, more 0|1, {}}
--@use time route story reply line use output close
local ms, limit, closed, more = now_ms(), tonumber(A[3]), 0, 0
for _, id in ipairs(call('ZRANGE', P .. 'inflight:' .. A[1], 0, -1)) do
  local o = call('HMGET', P .. 'op:' .. id, 'state', 'route', 'reply_to')
  if o[1] == 'recorded' and select(3, split(o[2])) == A[2] then
    if closed == limit then
      more = 1
      break
    end
    not_started(id, o[2], o[3], ms, 'the node is draining')
    closed = closed + 1
  end
end
return { closed, 0, more, {} }
